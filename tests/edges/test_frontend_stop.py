"""The last moment of a frontend that stops: whoever is connected by then is answered, not cut off."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest

from edges.frontend_thread import read_answer, running_frontend
from packhorse_frontend.connection import server
from waiting import wait_until

REQUEST = b'POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: 15\r\n\r\n{"input":"t10"}'
CLIENTS = 20


def test_connections_that_wait_in_the_kernel_are_answered() -> None:
    """The event loop takes them in one at a time: closing the socket before it has them all would reset the rest."""
    with running_frontend() as bench, contextlib.ExitStack() as clients:

        def stop_after_a_stall() -> None:
            stalled.set()
            assert sent.wait(10)  # the stall that fills the kernel's queue
            bench.frontend.begin_drain()
            bench.server.stop()

        stalled, sent = threading.Event(), threading.Event()
        bench.loop.call_soon_threadsafe(stop_after_a_stall)
        assert stalled.wait(10)
        waiting = [clients.enter_context(bench.connect()) for _ in range(CLIENTS)]
        for connection in waiting:
            connection.sendall(REQUEST)
        sent.set()
        assert [read_answer(connection)[0] for connection in waiting] == [503] * CLIENTS


def test_a_connection_without_a_request_yet_may_still_send_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_LAST_ANSWERS_S", 2.0)
    with running_frontend() as bench, bench.connect() as early:
        wait_until(lambda: bench.server.server_state.connections)
        bench.loop.call_soon_threadsafe(bench.frontend.begin_drain)
        bench.loop.call_soon_threadsafe(bench.server.stop)
        wait_until(lambda: _refuses(bench.port))
        early.sendall(REQUEST)
        status, headers, _ = read_answer(early)
        assert (status, headers["connection"]) == (503, "close")


def _refuses(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False
