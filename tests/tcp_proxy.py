"""A link between two machines, on loopback: bytes go through it until a test lets it stall, or cuts it.

with TcpProxy(port_of_the_broker) as link:
    start_worker(f"tcp://127.0.0.1:{link.port}")
    with link.stalled():
        ...
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import threading
from collections.abc import Iterator
from types import TracebackType

_MOST_BYTES = 1 << 16
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: the connection ends with a reset, and what was on its way is gone."""


class _Pipe:
    """One direction of one connection."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source = source
        self.sink = sink
        self.waiting = bytearray()
        self.is_over = False


class TcpProxy:
    """Listens on ``port`` and forwards to ``target_port``, in a thread of its own. A connection's ends are closed together."""

    def __init__(self, target_port: int) -> None:
        self._target = ("127.0.0.1", target_port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.accepted = 0
        """Connections so far."""
        self._pipes: dict[socket.socket, _Pipe] = {}
        self._greeting: bytes | None = None
        self._is_stalled = False
        self._lock = threading.RLock()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, name="link", daemon=True)

    def __enter__(self) -> TcpProxy:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        self._is_closed = True
        self._ring()
        self._thread.join(10)
        assert not self._thread.is_alive(), "the link itself hangs"
        self.cut()
        self._listener.close()
        os.close(self._bell)

    # ---- the harm ----

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        """Takes bytes and passes none on; afterwards all of them, in order."""
        self._is_stalled = True
        try:
            yield
        finally:
            self._is_stalled = False
            self._ring()

    def cut(self) -> None:
        """Reset all connections: what was on its way is gone. New ones go through."""
        with self._lock:
            for each in list(self._pipes):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                each.close()
            self._pipes.clear()
            self._ring()

    @contextlib.contextmanager
    def answering(self, greeting: bytes) -> Iterator[None]:
        """Answers new connections itself and closes them, as a load balancer does that has nothing behind it."""
        self._greeting = greeting
        try:
            yield
        finally:
            self._greeting = None

    # ---- in the thread ----

    def _ring(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._bell, 1)

    def _serve(self) -> None:
        while not self._is_closed:
            with self._lock:
                selector = self._selector()
            with selector:
                ready = selector.select(0.5)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._bell)
            with self._lock:
                for key, events in ready:
                    self._attend(key.fileobj, events)

    def _selector(self) -> selectors.BaseSelector:
        selector = selectors.DefaultSelector()
        selector.register(self._bell, selectors.EVENT_READ)
        selector.register(self._listener, selectors.EVENT_READ)
        for source, pipe in self._pipes.items():
            behind = self._pipes[pipe.sink]
            events = selectors.EVENT_READ if not pipe.is_over else 0
            events |= selectors.EVENT_WRITE if behind.waiting and not self._is_stalled else 0
            if events:
                selector.register(source, events)
        return selector

    def _attend(self, which: object, events: int) -> None:
        if which is self._listener:
            self._accept()
        elif isinstance(which, socket.socket) and which in self._pipes:
            pipe = self._pipes[which]
            try:
                if events & selectors.EVENT_READ:
                    taken = which.recv(_MOST_BYTES)
                    pipe.waiting += taken
                    pipe.is_over = not taken
                if events & selectors.EVENT_WRITE:
                    behind = self._pipes[pipe.sink]
                    del behind.waiting[: which.send(behind.waiting)]
            except OSError:
                self._close(pipe)
                return
            if pipe.is_over and not pipe.waiting:
                self._close(pipe)

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        self.accepted += 1
        if self._greeting is not None:
            with near:
                near.sendall(self._greeting)
            return
        try:
            far = socket.create_connection(self._target, timeout=5)
        except OSError:
            near.close()
            return
        for each in (near, far):
            each.setblocking(False)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._pipes[near] = _Pipe(near, far)
        self._pipes[far] = _Pipe(far, near)

    def _close(self, pipe: _Pipe) -> None:
        for each in (pipe.source, pipe.sink):
            self._pipes.pop(each, None)
            each.close()
