"""The broker's side of the workers' endpoint, played by a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import zmq

from packhorse_shared import messages as m
from packhorse_shared.codec import Buffer, Decoder, encode
from packhorse_shared.run_dir import RunDir
from packhorse_shared.sockets import open_router

BOOT = 11


class Broker:
    """The broker's side of the workers' endpoint."""

    def __init__(self, run_dir: RunDir) -> None:
        run_dir.ensure_token()
        self._context = zmq.Context()
        self._socket = open_router(self._context, run_dir.workers_endpoint)
        kinds = (m.WorkerAnnounce, m.WorkerHello, m.Beat, m.Done, m.BatchFailed, m.Draining, m.Bye)
        self._decoder = Decoder(*kinds)
        self._worker = b""

    def next(self, *, beats: bool = False) -> tuple[Any, bytes]:
        """The next message and its payload, beats left out unless asked for."""
        while self._socket.poll(10_000):
            self._worker, *frames = self._socket.recv_multipart()
            message, payload = self._decoder.decode(frames)
            if beats or not isinstance(message, m.Beat):
                return message, bytes(payload)
        raise AssertionError("no message within 10 s")

    def beat_where(self, wanted: Callable[[m.Beat], bool]) -> m.Beat:
        while True:
            message, _ = self.next(beats=True)
            if isinstance(message, m.Beat) and wanted(message):
                return message

    def say(self, message: Any, payload: Buffer = b"") -> None:
        self._socket.send_multipart([self._worker, *encode(message, payload)])

    def say_raw(self, *frames: bytes) -> None:
        self._socket.send_multipart([self._worker, *frames])

    def send_work(self, batch_id: int, *inputs: list[int], boot_id: int = BOOT, **fields: Any) -> None:
        ids = np.array([each for ids in inputs for each in ids], dtype="<i4")
        self.say(m.Work(boot_id, batch_id, [len(each) for each in inputs], **fields), ids.tobytes())

    def close(self) -> None:
        self._context.destroy(linger=0)
