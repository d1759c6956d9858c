"""HTTP as nobody sends it who means well, against real processes: closed or refused within 10 s, and nobody else notices.

``tests/edges/test_http_protocol.py`` says what is answered to what; here it is that the server stands it.
"""

from __future__ import annotations

import contextlib
import gzip
import socket
import subprocess
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import orjson
import psutil
import pytest

from aims import Aims
from footprint import Settled
from http_answers import AnswerReader
from questions import Question, ask, random_questions
from raw_http import BODY, CHUNKED, POST, Ending, chunk, connect, connect_unix, post, read_to_end, reset, send
from standin_stack import StandInFactory, StandInStack
from waiting import wait_until
from witness import bystanders

pytestmark = pytest.mark.process

SEED = 71
ENDED_WITHIN_S = 10.0
RECEIVE_TIMEOUT_S = 2.0
KEEP_ALIVE_S = 2.0
MAX_BODY_BYTES = 4 << 20
MAX_CONNECTIONS = 100
MIB = 1 << 20
CLOSE = b"Connection: close\r\n"
GZIP = b"Content-Encoding: gzip"
DEEP = 100_000

Attack = bytes | Callable[[], Iterable[bytes]]


@pytest.fixture(scope="module")
def stack(make_shared_standin: StandInFactory) -> StandInStack:
    """One server for all attacks, warmed up with the largest bodies and answers that it takes."""
    stack = make_shared_standin(
        f"--receive_timeout={RECEIVE_TIMEOUT_S:g}",
        f"--max_body_bytes={MAX_BODY_BYTES}",
        f"--max_connections={MAX_CONNECTIONS}",
        f"--keep_alive={KEEP_ALIVE_S:g}",
        "--max_inputs=10000",
        "--max_batch_size=2048",
        "--max_num_tokens=65536",
        "--max_queue_size=1000000",
    )
    stack.start().wait_ready()
    padded = b'{"input":"t10"%b}' % (b" " * (MAX_BODY_BYTES - 20))
    for sent in (post(padded, CLOSE[:-2]), post(gzip.compress(padded), GZIP, CLOSE[:-2]), post(PIECEMEAL, CLOSE[:-2])):
        for _ in range(2):
            assert send(stack.port, sent).statuses in ([200], [400])
    return stack


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    return random_questions(SEED)


def assert_refused(stack: StandInStack, attacks: dict[str, Attack], *, may_be_200: Iterable[str] = ()) -> None:
    """Each is answered once with 4xx, or not at all, and its connection closed in time. For a connection that ends in the
    midst of its sending, the kernel may have thrown the answer away."""
    for name, attack in attacks.items():
        ending = send(stack.port, attack if isinstance(attack, bytes) else attack())
        assert_ended(name, ending)
        if name not in may_be_200:
            assert all(400 <= status < 500 for status in ending.statuses), f"{name}: {ending.statuses}"


def assert_ended(name: str, ending: Ending) -> None:
    assert ending.is_closed, f"{name}: open after {ending.seconds:.1f} s, {ending.statuses}"
    assert ending.seconds < ENDED_WITHIN_S, f"{name}: {ending.seconds:.1f} s"
    assert len(ending.statuses) <= 1, f"{name}: {ending.statuses}"
    assert not ending.left, f"{name}: {ending.left[:200]!r}"


def repeat(head: bytes, piece: bytes, times: int) -> Callable[[], Iterator[bytes]]:
    """Bytes without end, or nearly so, that need not be in memory."""

    def pieces() -> Iterator[bytes]:
        yield head
        for _ in range(times):
            yield piece

    return pieces


# ---- what is no HTTP, and what two servers read differently ----

MALFORMED: dict[str, Attack] = {
    "TLS to a plain port": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x20" * 500,
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
    "SSH": b"SSH-2.0-OpenSSH_9.6\r\n",
    "NULs": b"\x00" * 1000,
    "many NULs": b"\x00" * 200_000,
    "NUL in the path": b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
    "NUL in a header": b"GET / HTTP/1.1\r\nX: a\x00b\r\n\r\n",
    "NUL in a name": b"GET / HTTP/1.1\r\nX\x00: b\r\n\r\n",
    "line feeds": repeat(b"", b"\n" * MIB, 10),
    "HTTP/0.9": b"GET /live\r\n\r\n",
    "asterisk": b"GET * HTTP/1.1\r\nHost: x\r\n" + CLOSE + b"\r\n",
    "asterisk, OPTIONS": b"OPTIONS * HTTP/1.1\r\nHost: x\r\n" + CLOSE + b"\r\n",
    "CONNECT": b"CONNECT x:443 HTTP/1.1\r\nHost: x:443\r\n\r\n",
    "absolute form without a path": b"GET http://x HTTP/1.1\r\nHost: x\r\n\r\n",
    "absolute form of an impossible port": b"GET http://x:99999/live HTTP/1.1\r\nHost: x\r\n\r\n",
    "a script as target": b"GET javascript:alert(1) HTTP/1.1\r\nHost: x\r\n\r\n",
    "out of the root": b"GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\n" + CLOSE + b"\r\n",
    "path in Latin-1": b"GET /\xe9 HTTP/1.1\r\nHost: x\r\n\r\n",
}


def test_what_is_no_http(stack: StandInStack, questions: list[Question], settled: Settled, aims: Aims) -> None:
    with settled(stack), bystanders(stack, questions, aims):
        assert_refused(stack, MALFORMED)
    absolute = b"POST http://x/v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n" % len(BODY)
    assert send(stack.port, absolute + CLOSE + b"\r\n" + BODY).statuses == [200], "what proxies are sent is fine"


def _framed(*lines: bytes, body: bytes = BODY) -> bytes:
    return POST + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + body


_LENGTH = b"Content-Length: %d" % len(BODY)
_TE = b"Transfer-Encoding: chunked"
_CHUNKS = chunk(BODY) + b"0\r\n\r\n"

SMUGGLED: dict[str, Attack] = {
    "CL and TE": _framed(b"Content-Length: 3", _TE, body=_CHUNKS),
    "TE and CL": _framed(_TE, b"Content-Length: 3", body=_CHUNKS),
    "two CL": _framed(_LENGTH, b"Content-Length: 3"),
    "two CL, the same": _framed(_LENGTH, _LENGTH),
    "CL as a list": _framed(b"Content-Length: 19, 19"),
    "CL with a sign": _framed(b"Content-Length: +19"),
    "CL in hex": _framed(b"Content-Length: 0x13"),
    "CL with an underscore": _framed(b"Content-Length: 1_9"),
    "CL empty": _framed(b"Content-Length:"),
    "CL beyond 64 bits": _framed(b"Content-Length: 99999999999999999999999"),
    "CL of 2**64 - 1": _framed(b"Content-Length: 18446744073709551615"),
    "CL before a blank": _framed(b"Content-Length : 19"),
    "CL in Arabic digits": _framed("Content-Length: \u0661\u0669".encode()),
    "TE twice": _framed(_TE, _TE, body=_CHUNKS),
    "TE of two": _framed(b"Transfer-Encoding: chunked, identity", body=_CHUNKS),
    "TE of two, chunked last": _framed(b"Transfer-Encoding: identity, chunked", body=_CHUNKS),
    "TE in two lines": _framed(b"Transfer-Encoding: identity", _TE, body=_CHUNKS),
    "TE gzip": _framed(b"Transfer-Encoding: gzip, chunked", body=_CHUNKS),
    "TE misspelt": _framed(b"Transfer-Encoding: xchunked", body=_CHUNKS),
    "TE behind a vertical tab": _framed(b"Transfer-Encoding: \x0bchunked", body=_CHUNKS),
    "TE in quotes": _framed(b'Transfer-Encoding: "chunked"', body=_CHUNKS),
    "TE with a parameter": _framed(b"Transfer-Encoding: chunked;q=1", body=_CHUNKS),
    "TE before a blank": _framed(b"Transfer-Encoding : chunked", body=_CHUNKS),
    "TE folded": _framed(b"Transfer-Encoding:\r\n chunked", body=_CHUNKS),
    "TE with HTTP/1.0": _framed(_TE, body=_CHUNKS).replace(b"HTTP/1.1", b"HTTP/1.0"),
    "folded header": _framed(b"X: a\r\n b", _LENGTH),
    "folded length": _framed(b"X: a\r\n Content-Length: 3", _LENGTH),
    "blank before the first header": _framed(_LENGTH).replace(b"Host", b" Host"),
    "bare LF throughout": _framed(_LENGTH).replace(b"\r\n", b"\n"),
    "bare LF once": _framed(b"X: y\nX: z", _LENGTH),
    "bare LF at the end": POST + _LENGTH + b"\r\n\n" + BODY,
    "LF, then CRLF": POST + _LENGTH + b"\n\r\n" + BODY,
    "bare CR": _framed(b"X: y\rZ: z", _LENGTH),
    "two hosts": _framed(b"Host: y", _LENGTH),
    "no colon": _framed(b"Xyz", _LENGTH),
    "no name": _framed(b": xyz", _LENGTH),
    "chunk with LF": CHUNKED + b"13\n" + BODY + b"\n0\n\n",
    "chunk in 0x": CHUNKED + b"0x13\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk with a sign": CHUNKED + b"-13\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk without a size": CHUNKED + b"\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk longer than it says": CHUNKED + b"5\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk of 2**64": CHUNKED + b"10000000000000000\r\nabc",
    "chunk of 2**64 - 1": CHUNKED + b"ffffffffffffffff\r\nabc",
    "chunk of 100 digits": CHUNKED + b"f" * 100 + b"\r\nabc",
    "size of a chunk without end": repeat(CHUNKED, b"0" * MIB, 20),
    "chunk extension without end": repeat(CHUNKED + b"f;", b"a" * MIB, 20),
    "trailers without end": repeat(CHUNKED + chunk(BODY) + b"0\r\n", b"X: yyyy\r\n" * 100_000, 20),
    "a length as trailer": CHUNKED + chunk(BODY) + b"0\r\nContent-Length: 50\r\n\r\n",
}


def test_smuggling(stack: StandInStack, questions: list[Question], settled: Settled, aims: Aims) -> None:
    """What is smuggled would be seen as a second answer on the connection."""
    with settled(stack), bystanders(stack, questions, aims):
        assert_refused(stack, SMUGGLED)
    asked = post(BODY) + b"SMUGGLED / HTTP/1.1\r\nHost: x\r\n\r\n"
    assert send(stack.port, asked).statuses == [200, 400]


# ---- too slow ----


def test_slow_clients(stack: StandInStack, questions: list[Question], settled: Settled, aims: Aims) -> None:
    """All at once, each several times: a byte a second, half requests, silence."""
    slow: dict[str, tuple[list[bytes], float]] = {
        "silence": ([], 0),
        "half a head": ([POST], 0),
        "half a body": ([post(BODY)[:-5]], 0),
        "half a chunk": ([CHUNKED + b"13\r\n" + BODY[:5]], 0),
        "no last chunk": ([CHUNKED + chunk(BODY)], 0),
        "an empty line a second": ([b"\r\n"] * 15, 1.0),
        "a byte of the head a second": ([POST[at : at + 1] for at in range(15)], 1.0),
        "a header a second": ([POST, *[b"X: y\r\n"] * 15], 1.0),
        "a byte of the body a second": ([post(BODY)[: -len(BODY)], *[b" "] * 15], 1.0),
        "a chunk a second": ([CHUNKED, *[chunk(b" ")] * 15], 1.0),
        "a large body announced": ([POST + b"Content-Length: 4000000\r\n\r\n", *[b" "] * 15], 1.0),
    }
    with settled(stack), bystanders(stack, questions, aims), ThreadPoolExecutor(3 * len(slow)) as pool:
        asked = [
            (name, pool.submit(send, stack.port, pieces, pause_s=pause_s))
            for name, (pieces, pause_s) in slow.items()
            for _ in range(3)
        ]
        for name, outcome in asked:
            ending = outcome.result()
            assert_ended(name, ending)
            assert ending.statuses == [408], name
            assert ending.seconds > 0.9 * RECEIVE_TIMEOUT_S, name


# ---- too much ----

LARGE: dict[str, Attack] = {
    "a header of 100 MB": repeat(b"GET / HTTP/1.1\r\nX: ", b"a" * MIB, 100),
    "headers of 100 MB": repeat(b"GET / HTTP/1.1\r\n", b"X: yyyyyyyyyyyyy\r\n" * (MIB >> 4), 100),
    "empty lines of 100 MB": repeat(b"", b"\r\n" * (MIB >> 1), 100),
    "a URL of 1 MB": b"GET /" + b"a" * MIB + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "a method of 1 MB": b"A" * MIB + b" / HTTP/1.1\r\nHost: x\r\n\r\n",
    "300 MB as announced": repeat(POST + b"Content-Length: %d\r\n\r\n" % (300 * MIB), b" " * MIB, 300),
    "300 MB in chunks": repeat(CHUNKED, chunk(b" " * MIB), 300),
    "300 MB of tiny chunks": repeat(CHUNKED, chunk(b" ") * (MIB // 6), 300),
    "300 MB after a small length": repeat(post(BODY), b" " * MIB, 300),
    "300 MB that nobody reads": repeat(
        b"GET /live HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (300 * MIB), b" " * MIB, 300
    ),
    "300 MB of chunks that nobody reads": repeat(
        b"GET /live HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n", chunk(b" " * MIB), 300
    ),
    "300 MB for no route": repeat(b"POST /nope HTTP/1.1\r\nHost: x\r\n" + _TE + b"\r\n\r\n", chunk(b" " * MIB), 300),
}
ANSWERED_FIRST = ("300 MB after a small length", "300 MB that nobody reads", "300 MB of chunks that nobody reads")


def test_large_requests(stack: StandInStack, questions: list[Question], settled: Settled, aims: Aims) -> None:
    with settled(stack), bystanders(stack, questions, aims):
        for name, attack in LARGE.items():
            assert_refused(stack, {name: attack}, may_be_200=ANSWERED_FIRST)


def _nested(prefix: bytes, opening: bytes = b"[", closing: bytes = b"]", suffix: bytes = b"}", inner: bytes = b"") -> bytes:
    return prefix + opening * DEEP + inner + closing * DEEP + suffix


NESTED = {
    "the body": b"[" * DEEP,
    "the input": _nested(b'{"input":'),
    "the input, open": b'{"input":' + b"[" * DEEP,
    "an element": _nested(b'{"input":["t10",', suffix=b"]}"),
    "an element of ids": _nested(b'{"input":[[10],', suffix=b"]}"),
    "a second input": _nested(b'{"input":"t10","input":'),
    "an unknown field": _nested(b'{"input":"t10","x":'),
    "an unknown field before": _nested(b'{"x":', suffix=b',"input":"t10"}'),
    "objects": _nested(b'{"input":"t10","x":', b'{"a":', b"}", inner=b"1"),
    "the model": _nested(b'{"input":"t10","model":'),
    "dimensions": _nested(b'{"input":"t10","dimensions":'),
    "the format": _nested(b'{"input":"t10","encoding_format":'),
    "beside half a surrogate pair": _nested(b'{"input":"t10","y":"\\ud800","x":'),
    "behind half a surrogate pair": _nested(b'{"input":["\\ud800",', suffix=b"]}"),
    "beside bytes that are not UTF-8": _nested(b'{"input":"t10","y":"\xff","x":'),
}


def test_deep_nesting(stack: StandInStack, questions: list[Question], settled: Settled, aims: Aims) -> None:
    """Whole and packed, above and below the size from which a body is read in a thread."""
    with settled(stack), bystanders(stack, questions, aims):
        for name, body in NESTED.items():
            shallow = body.replace(b"[" * DEEP, b"[" * 20_000).replace(b"]" * DEEP, b"]" * 20_000)
            for size, sent in (("large", body), ("small", shallow)):
                for packed in (post(sent, CLOSE[:-2]), post(gzip.compress(sent), GZIP, CLOSE[:-2])):
                    ending = send(stack.port, packed)
                    assert_ended(name, ending)
                    assert ending.statuses == [400], f"{name}, {size}"
        # Brackets that are nothing but text.
        for body in (b'{"input":"%b"}' % (b"[" * DEEP), b'{"input":"t10","%b":1}' % (b"[" * DEEP)):
            assert send(stack.port, post(body, CLOSE[:-2])).statuses == [200]


def _zeros(mib: int) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    return b"".join([*(packer.compress(bytes(MIB)) for _ in range(mib)), packer.flush()])


def _ids(inputs: int) -> bytes:
    return b'{"input":[%b]}' % b",".join([b"[10]"] * inputs)


PIECEMEAL, WHOLE = _ids(10_000), _ids(8_000)
"""Their answers are about a megabyte: one is written piece by piece, the other all at once."""


def test_gzip_bombs(stack: StandInStack, questions: list[Question], settled: Settled, aims: Aims) -> None:
    bomb = _zeros(512)
    packed: dict[str, tuple[bytes, int]] = {
        "a bomb": (bomb, 413),
        "a bomb in a bomb": (gzip.compress(bomb), 400),
        "half a bomb": (_zeros(3)[:-100], 400),
        "empty members": (gzip.compress(b"") * (3 * MIB // 20), 400),
        "members of a byte": (gzip.compress(b" ") * (3 * MIB // 21), 400),
        "a name without end": (b"\x1f\x8b\x08\x08\x00\x00\x00\x00\x00\x00" + b"a" * (3 * MIB), 400),
        "no gzip": (BODY, 400),
        "garbage behind it": (gzip.compress(BODY) + b"garbage", 400),
        "nothing": (b"", 400),
        "brackets": (gzip.compress(b'{"x":' + b"[" * (3 * MIB)), 400),
        "keys": (gzip.compress(b"{" + b'"a":1,' * (MIB // 2) + b'"input":"t10"}'), 400),
        "ids": (gzip.compress(b'{"input":[' + b"1," * MIB + b"1]}"), 400),
        "texts": (gzip.compress(b'{"input":[' + b'"a",' * (MIB // 2) + b'"a"]}'), 400),
        "one text": (gzip.compress(b'{"input":"' + b"a" * (3 * MIB) + b'"}'), 400),
    }
    with settled(stack), bystanders(stack, questions, aims):
        for name, (body, status) in packed.items():
            ending = send(stack.port, post(body, GZIP, CLOSE[:-2]))
            assert_ended(name, ending)
            assert ending.statuses == [status], name
        for coding in (b"gzip, gzip", b"deflate", b"br", b"[" * 10_000):
            assert send(stack.port, post(BODY, b"Content-Encoding: " + coding, CLOSE[:-2])).statuses == [415]


# ---- too many ----


def test_all_connections_and_more(stack: StandInStack, questions: list[Question], settled: Settled, aims: Aims) -> None:
    """Silent ones take all places, for the time to receive; who has a connection is served on; who comes then gets 503."""
    with settled(stack), bystanders(stack, questions, aims), contextlib.ExitStack() as open_ones:
        held = [open_ones.enter_context(connect(stack.port)) for _ in range(MAX_CONNECTIONS)]
        ending = send(stack.port, post(BODY))
        assert ending.statuses == [503]
        assert 1 <= int(ending.answers[0].headers[b"retry-after"]) <= 30
        held += [open_ones.enter_context(connect(stack.port)) for _ in range(4 * MAX_CONNECTIONS)]
        began = time.monotonic()
        for connection in held:
            ending = read_to_end(connection, began)
            assert ending.is_closed
            assert ending.statuses in ([], [408])
        assert time.monotonic() - began < ENDED_WITHIN_S
        wait_until(lambda: send(stack.port, post(BODY, CLOSE[:-2])).statuses == [200])


def test_connections_that_are_reset(stack: StandInStack, questions: list[Question], settled: Settled, aims: Aims) -> None:
    """In mid-head, mid-body, mid-chunk, while the answer is made, and in mid-answer."""
    large = post(_ids(4_000))
    with settled(stack), bystanders(stack, questions, aims):
        for number in range(300):
            connection = connect(stack.port, receive_buffer_bytes=4096)
            connection.sendall((b"POST /v1", post(BODY)[:-3], CHUNKED + b"13\r\nab", post(BODY), large)[number % 5])
            if number % 5 == 4:
                assert connection.recv(12) == b"HTTP/1.1 200"
            reset(connection)


@contextlib.contextmanager
def unix_frontend(stack: StandInStack) -> Iterator[tuple[psutil.Process, str]]:
    """One more frontend of this server, on a Unix socket: there the kernel buffers little, so that what a client does not
    read waits in the frontend. On loopback it takes 4 MB."""
    path = str(stack.run_dir / "http.sock")
    flags = [f"--run_dir={stack.run_dir}", f"--uds={path}", f"--keep_alive={KEEP_ALIVE_S:g}", "--max_inputs=10000"]
    environment = stack.child_environment() | {"PACKHORSE_MODEL": str(stack.model)}
    with (
        stack.output.open("ab") as output,
        subprocess.Popen([*stack.command, "frontend", *flags], env=environment, stdout=output, stderr=output) as process,
    ):
        try:
            wait_until(lambda: _is_healthy(path), 30, "the frontend on a Unix socket")
            yield psutil.Process(process.pid), path
        finally:
            process.terminate()


def _is_healthy(path: str) -> bool:
    try:
        with connect_unix(path) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n" + CLOSE + b"\r\n")
            return read_to_end(connection).statuses == [200]
    except OSError:
        return False


def test_clients_that_do_not_read(stack: StandInStack, questions: list[Question], settled: Settled, aims: Aims) -> None:
    """Each asks for a megabyte of text, and reads nothing but the beginning: that is held, and cut off after --keep_alive. Two
    that read slowly but steadily get all of theirs."""
    with (
        settled(stack),
        unix_frontend(stack) as (frontend, path),
        bystanders(stack, questions, aims, attacked=frontend),
        contextlib.ExitStack() as open_ones,
    ):
        readers, descriptors = [], frontend.num_fds()
        for number in range(16):
            connection = open_ones.enter_context(connect_unix(path))
            connection.sendall(post((PIECEMEAL, WHOLE)[number % 2]))
            assert connection.recv(12) == b"HTTP/1.1 200"
            readers.append(connection)
        with ThreadPoolExecutor(2) as pool:
            slow = list(pool.map(_read_slowly, (readers.pop(), readers.pop())))
        assert sorted(len(orjson.loads(ending.answers[0].body)["data"]) for ending in slow) == [8_000, 10_000]
        assert min(ending.seconds for ending in slow) > KEEP_ALIVE_S
        wait_until(lambda: frontend.num_fds() <= descriptors + 2, 3 * KEEP_ALIVE_S, "their connections to be cut off")
        for connection in readers:
            ending = read_to_end(connection, read_before=b"HTTP/1.1 200")
            assert ending.is_closed
            assert not ending.answers, "its rest came although the connection was to be cut off"


def _read_slowly(connection: socket.socket) -> Ending:
    """Read a few kilobytes at a time: for longer than --keep_alive in all, but never so long nothing."""
    ending, reader, began = Ending(), AnswerReader(), time.monotonic()
    reader.feed(b"HTTP/1.1 200")
    while not ending.answers:
        reader.feed(connection.recv(16384))
        time.sleep(0.06)  # the fault
        if (answer := reader.take()) is not None:
            ending.answers.append(answer)
    ending.seconds = time.monotonic() - began
    return ending


# ---- ahead ----


def test_requests_sent_ahead(stack: StandInStack, questions: list[Question], settled: Settled, aims: Aims) -> None:
    """They are answered in order, each with its own vectors; who sends without end ahead is closed after an answer."""
    asked = [ask([f"t{10 + number % 70} t{10 + number // 2}"]) for number in range(100)]
    with settled(stack), bystanders(stack, questions, aims), connect(stack.port) as connection:
        connection.sendall(b"".join(each.wire for each in asked))
        reader = AnswerReader()
        for question in asked:
            while (answer := reader.take()) is None:
                reader.feed(connection.recv(1 << 16))
            assert answer.status == 200
            assert question.is_answered_by(answer.body)
        assert not reader.left
        flooded = send(stack.port, repeat(b"", post(BODY) * 10_000, 50)())
        assert flooded.is_closed
        assert flooded.seconds < ENDED_WITHIN_S
        assert set(flooded.statuses) <= {200}
