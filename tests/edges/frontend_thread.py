"""What the frontend's tests stand on: tiny tokenizers, a frontend in a thread on a real port, plain sockets to it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvloop
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from edges.fake_broker import FakeBroker, running_broker
from packhorse_frontend.app import Frontend, FrontendPlan
from packhorse_frontend.connection.server import DrainingServer, uvicorn_config
from packhorse_frontend.layers.keys import Keys
from packhorse_frontend.layers.tracing import Tracing
from packhorse_shared.run_dir import RunDir
from packhorse_shared.settings import HttpSettings
from waiting import wait_until

NAMES = ("tiny", "tiny-alias")
WORDS = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, **{f"t{number}": number for number in range(10, 128)}}


def build_tokenizer(template: str | None = "[CLS] $A [SEP]") -> Tokenizer:
    """T's tokenizer, with padding and truncation switched on, as many models ship theirs."""
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in ("[PAD]", "[UNK]", "[CLS]", "[SEP]")])
    if template is not None:
        specials = [(word, WORDS[word]) for word in ("[CLS]", "[SEP]") if word in template]
        pair = "[CLS] $A [SEP] $B:1 [SEP]:1" if template == "[CLS] $A [SEP]" else None
        tokenizer.post_processor = processors.TemplateProcessing(single=template, pair=pair, special_tokens=specials)
    tokenizer.enable_padding(length=16)
    tokenizer.enable_truncation(8)
    return tokenizer


def save_tokenizer(folder: Path, template: str | None = "[CLS] $A [SEP]") -> Path:
    build_tokenizer(template).save(str(folder / "tokenizer.json"))
    return folder


@dataclass
class Bench:
    """A frontend that serves in a thread, its fake broker, and its address."""

    broker: FakeBroker
    frontend: Frontend
    server: DrainingServer
    port: int
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def post(self, body: Any = None, *, path: str = "/v1/embeddings", **options: Any) -> httpx.Response:
        """POST a body: JSON, or bytes as they are."""
        if isinstance(body, bytes):
            options["content"] = body
        elif body is not None:
            options["json"] = body
        return httpx.post(self.url + path, timeout=30, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30, **options)

    def connect(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port))
        connection.settimeout(10)
        return connection

    def exchange(self, data: bytes) -> bytes:
        """Send bytes, and read all that comes until the server closes."""
        with self.connect() as connection:
            with contextlib.suppress(ConnectionError):
                connection.sendall(data)
            return read_all(connection)

    def signal(self, number: int) -> None:
        """As if the process got a signal."""
        self.loop.call_soon_threadsafe(self.server.on_signal, number)


class _ThreadServer(DrainingServer):
    """The real server, without the signal handlers that only a main thread may set."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def read_all(connection: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := connection.recv(65536):
            received += chunk
    return received


def read_answer(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """One answer with a content-length: status, headers, body."""
    received = b""
    while b"\r\n\r\n" not in received:
        chunk = connection.recv(65536)
        assert chunk, f"closed after {received!r}"
        received += chunk
    head, _, body = received.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    while len(body) < int(headers.get("content-length", "0")):
        body += connection.recv(65536)
    return int(lines[0].split()[1]), headers, body


@contextlib.contextmanager
def running_frontend(
    http: HttpSettings | None = None,
    *,
    template: str | None = "[CLS] $A [SEP]",
    grace_s: float = 10.0,
    keys: Keys | None = None,
    wait: bool = True,
    find_model: Callable[[], Path] | None = None,
    tracing: Tracing | None = None,
    **broker_fields: Any,
) -> Iterator[Bench]:
    """A frontend on a free port with its fake broker; waits until it is ready unless told otherwise."""
    http = http or HttpSettings()
    # A short path: the path of a Unix socket is limited to 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ph-") as name, running_broker(Path(name), **broker_fields) as broker:
        folder = save_tokenizer(Path(name), template)
        plan = FrontendPlan(
            http=http,
            run_dir=RunDir(Path(name)),
            index=0,
            served_names=NAMES,
            keys=keys or Keys(()),
            threads=2,
            created=1_700_000_000,
            url="http://test",
            find_model=find_model or (lambda: folder),
            tracing=tracing,
        )
        started: list[Bench] = []
        listener = socket.create_server(("127.0.0.1", 0))

        async def serve() -> None:
            frontend = Frontend(plan, lambda: server.stop())  # noqa: PLW0108 (there is no server yet)
            server = _ThreadServer(uvicorn_config(http, frontend.app, frontend.on_refusal), frontend, grace_s=grace_s)
            started.append(Bench(broker, frontend, server, listener.getsockname()[1], asyncio.get_running_loop()))
            await server.serve(sockets=[listener])

        thread = threading.Thread(target=lambda: uvloop.run(serve()), daemon=True)
        thread.start()
        bench = wait_until(lambda: started and started[0].server.started and started[0])
        try:
            if wait:
                wait_until(lambda: bench.get("/health").status_code == 200)
            yield bench
        finally:
            bench.loop.call_soon_threadsafe(bench.server.stop)
            thread.join(10)
            assert not thread.is_alive(), "the frontend did not stop"
