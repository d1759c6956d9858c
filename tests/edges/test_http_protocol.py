"""HTTP/1.1 itself, with plain sockets: what comes in too large, too slowly, out of order or malformed."""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from edges.frontend_thread import Bench, read_all, read_answer, running_frontend
from packhorse_frontend.connection.http_protocol import GuardedProtocol
from packhorse_frontend.layers.keys import Keys
from packhorse_shared.settings import HttpSettings
from waiting import wait_until

BODY = b'{"input":"t10"}'
POST = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(BODY)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    """One frontend for the tests that only ask it."""
    with running_frontend() as running:
        yield running


@pytest.fixture(scope="module")
def hasty() -> Iterator[Bench]:
    """A frontend that waits for nobody."""
    with running_frontend(HttpSettings(receive_timeout=0.3, keep_alive=1.0)) as running:
        yield running


def parse(raw: bytes) -> tuple[int, dict[str, str], dict[str, Any]]:
    head, _, body = raw.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    return int(lines[0].split()[1]), dict(line.lower().split(": ", 1) for line in lines[1:]), json.loads(body)["error"]


def refusal(raw: bytes, status: int) -> dict[str, str]:
    """The headers of an answer that must be a refusal in the envelope, after which the connection ends."""
    found, headers, error = parse(raw)
    assert found == status, raw
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == ("overloaded_error" if status == 503 else "invalid_request_error")
    assert headers["content-type"] == "application/json"
    assert headers["connection"] == "close"
    assert headers["x-request-id"]
    return headers


# ---- paths, methods, ids ----


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/embeddings/", "/embeddings", "/embeddings/", "/v1/embeddings//"])
def test_paths_work_with_and_without_a_slash(bench: Bench, path: str) -> None:
    """No redirect, which would lose the POST."""
    assert bench.post({"input": "t10"}, path=path, follow_redirects=False).status_code == 200


@pytest.mark.parametrize("path", ["/v1/embeddings/embeddings", "/v1", "/v1/v1/embeddings", "/%ff"])
def test_other_paths_name_the_right_one(bench: Bench, path: str) -> None:
    answer = bench.post({"input": "t10"}, path=path)
    assert answer.status_code == 404
    assert "/v1/embeddings" in answer.json()["error"]["message"]
    assert "detail" not in answer.json()


def test_a_wrong_method_is_told_the_right_one(bench: Bench) -> None:
    answer = bench.get("/v1/embeddings")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["type"] == "invalid_request_error"
    answer = bench.post(b"", path="/health")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")
    assert httpx.head(f"{bench.url}/health").status_code == 200


def test_every_answer_has_a_request_id(bench: Bench) -> None:
    own = {"x-request-id": "mine-1.2:3"}
    for path in ("/live", "/nope", "/v1/models"):
        assert bench.get(path, headers=own).headers["x-request-id"] == "mine-1.2:3"
    for bad in ("", "a b", "x" * 129, "ä", 'a"b'):
        given = bench.get("/live", headers={"x-request-id": bad.encode()}).headers["x-request-id"]
        assert len(given) == 32
    assert bench.get("/live").headers["x-request-id"] != bench.get("/live").headers["x-request-id"]


def test_a_proxy_prefix_is_taken_off() -> None:
    with running_frontend(HttpSettings(root_path="/api"), wait=False) as bench:
        for path in ("/live", "/api/live"):
            wait_until(lambda path=path: bench.get(path).status_code == 200)


# ---- heads ----


def test_a_head_up_to_the_limit_is_taken(bench: Bench) -> None:
    start = b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Filler: "
    exact = start + b"a" * (16 * 1024 - len(start) - 4) + b"\r\n\r\n"
    assert bench.exchange(exact).startswith(b"HTTP/1.1 200")
    refusal(bench.exchange(exact.replace(b"aaaa", b"aaaaa", 1)), 431)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * 2_000_000,
        b"GET / HTTP/1.1\r\nX: " + b"a" * 2_000_000,
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 300_000,
        b"\r\n" * 1_000_000,
    ],
)
def test_an_endless_head_is_431(bench: Bench, head: bytes) -> None:
    refusal(bench.exchange(head), 431)


@pytest.mark.parametrize(
    "head",
    [
        b"garbage\r\n\r\n",
        b"GET / HTTP/1.1\nHost: x\n\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -3\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length : 3\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_malformed_and_smuggled_requests_are_400(bench: Bench, head: bytes) -> None:
    refusal(bench.exchange(head), 400)


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x20" * 500, "TLS"),
        (b"\x00", "method"),
        (b"\xff" * 5000, "method"),
        (b"\n", "method"),
        (b"get / HTTP/1.1\r\n", "method"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "first line"),
        (b"GET /live\r\n", "first line"),
        (b"GET /live HTTP/2.0\r\n", "first line"),
        (b"GET /live HTTP/1.2\r\n", "first line"),
        (b"GET  HTTP/1.1\r\n", "first line"),
        (b"PRI * HTTP/2.0\r\n", "first line"),
        (b"GET / HTTP/1.1\r\nHost: x\n\r", "LF"),
        (b"POST / HTTP/1.1\r\nContent-Length: 15\n\r\n", "LF"),
    ],
)
def test_what_is_no_http_is_refused_before_any_deadline(bench: Bench, sent: bytes, said: str) -> None:
    """Who speaks TLS to a plain port learns so at once, not after ten seconds of a handshake without an answer."""
    with bench.connect() as connection:
        connection.settimeout(5)  # half of what is waited for the rest of a head
        connection.sendall(sent)
        raw = read_all(connection)
    refusal(raw, 400)
    assert said in parse(raw)[2]["message"]


CHUNKED = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "head",
    [
        CHUNKED.replace(b"chunked", b"identity, chunked"),
        CHUNKED.replace(b"chunked", b"gzip, chunked"),
        CHUNKED.replace(b"chunked", b"identity\r\nTransfer-Encoding: chunked"),
        CHUNKED.replace(b"chunked", b"chunked\r\nTransfer-Encoding: chunked"),
        CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0"),
        CHUNKED.replace(b"Host: x", b"Host: x\r\nHost: y"),
    ],
)
def test_what_proxies_read_differently_is_refused(bench: Bench, head: bytes) -> None:
    refusal(bench.exchange(head + b"f\r\n" + BODY + b"\r\n0\r\n\r\n"), 400)


def test_a_chunked_body_that_is_mostly_framing_is_refused(bench: Bench) -> None:
    head = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    refusal(bench.exchange(head + b"1;" + b"x" * 100_000), 400)
    refusal(bench.exchange(head + b"0\r\n" + b"X: y\r\n" * 20_000), 400)


@pytest.mark.parametrize("upgrade", [b"h2c", b"websocket"])
def test_an_offer_to_upgrade_is_ignored_and_the_body_kept(bench: Bench, upgrade: bytes) -> None:
    """Java's client offers h2c with every first request."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %b\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n" % upgrade
    with bench.connect() as connection:
        for _ in range(2):
            connection.sendall(POST.replace(b"Host: x\r\n", b"Host: x\r\n" + offer) + BODY)
            assert read_answer(connection)[0] == 200


# ---- connections ----


def test_a_connection_is_kept_and_requests_sent_ahead_are_answered_in_order(bench: Bench) -> None:
    with bench.connect() as connection:
        connection.sendall(b"".join(POST + b'{"input":"t%d"}' % number for number in range(10, 60)))
        bodies = b""
        while bodies.count(b'"usage"') < 50:
            bodies += connection.recv(65536)
        assert bodies.count(b"HTTP/1.1 200") == 50
        connection.sendall(b"\r\n" + POST + BODY)
        assert read_answer(connection)[0] == 200


def test_who_sends_far_too_much_ahead_gets_one_answer() -> None:
    with running_frontend(is_holding=True) as bench, bench.connect() as connection:
        connection.sendall(POST + BODY)
        wait_until(lambda: bench.broker.received)
        connection.settimeout(0.5)
        flood = POST * 1_000_000
        with pytest.raises(TimeoutError):
            connection.sendall(flood)
        bench.broker.release()
        connection.settimeout(10)
        assert read_all(connection).count(b"HTTP/1.1 200") == 1


def test_an_idle_connection_outlives_the_time_to_receive_and_ends_with_keep_alive(hasty: Bench) -> None:
    """The deadline for a request does not run while there is none."""
    with hasty.connect() as connection:
        connection.sendall(POST + BODY)
        assert read_answer(connection)[0] == 200
        connection.settimeout(0.6)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(10)
        connection.sendall(POST + BODY)
        assert read_answer(connection)[0] == 200
        assert connection.recv(1) == b""


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\r\n",
        b"POST /v1/emb",
        POST,
        POST + BODY[:5],
        POST.replace(b"Content-Length: 15", b"Transfer-Encoding: chunked") + b"5\r\nab",
    ],
)
def test_who_does_not_finish_a_request_gets_408(hasty: Bench, sent: bytes) -> None:
    refusal(hasty.exchange(sent), 408)


def test_a_slow_head_is_408_however_steadily_it_comes(hasty: Bench) -> None:
    with hasty.connect() as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n")
        connection.settimeout(0.02)
        received = b""
        for _ in range(500):
            try:
                received = connection.recv(65536)
                break
            except TimeoutError:
                connection.sendall(b"X: y\r\n")
        connection.settimeout(10)
        refusal(received, 408)


def test_the_time_to_receive_grows_with_the_body() -> None:
    with running_frontend(HttpSettings(receive_timeout=0.2)) as bench, bench.connect() as connection:
        connection.sendall(POST.replace(b"15", b"%d" % (2 << 20)) + BODY)
        connection.settimeout(1.0)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(10)
        refusal(read_all(connection), 408)


def test_a_connection_too_many_gets_503() -> None:
    with running_frontend(HttpSettings(max_connections=2)) as bench:
        wait_until(lambda: not bench.server.server_state.connections)
        with bench.connect() as first, bench.connect() as second:
            for connection in (first, second):
                connection.sendall(POST + BODY)
                assert read_answer(connection)[0] == 200
            assert refusal(bench.exchange(POST + BODY), 503)["retry-after"] == "1"
            first.sendall(POST + BODY)
            assert read_answer(first)[0] == 200
        wait_until(lambda: bench.get("/live").status_code == 200)


@pytest.mark.parametrize("announced", [b"Content-Length: 400000000", b"Transfer-Encoding: chunked"])
def test_a_body_that_nobody_reads_is_not_received_for_ever(announced: bytes) -> None:
    """GET /live is answered without its body, which has the same limit as any other: then the connection ends."""
    with running_frontend(HttpSettings(max_body_bytes=100_000)) as bench, bench.connect() as connection:
        connection.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\n" + announced + b"\r\n\r\n")
        assert read_answer(connection)[0] == 200
        for _ in range(4):
            connection.sendall(b"10000\r\n" + b" " * 65536 + b"\r\n")
        connection.settimeout(5)
        assert read_all(connection) == b""


@pytest.mark.parametrize("rest", [b"", b"zz\r\n"])
def test_a_request_answered_before_its_body_came_gets_no_second_answer(hasty: Bench, rest: bytes) -> None:
    """Neither when the rest does not come in time, nor when it is malformed."""
    with hasty.connect() as connection:
        connection.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert read_answer(connection)[0] == 200
        connection.sendall(rest)
        assert read_all(connection) == b""


def test_a_body_of_tiny_chunks_leaves_others_their_turn(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one client sends in one go may be a hundred thousand calls; the event loop goes on between them."""
    turn, pieces = 0, Counter[int]()
    take = GuardedProtocol.on_body

    def count_turns() -> None:
        nonlocal turn
        turn += 1
        if not is_over:
            bench.loop.call_soon(count_turns)

    def count_pieces(protocol: GuardedProtocol, body: bytes) -> None:
        pieces[turn] += 1
        take(protocol, body)

    monkeypatch.setattr(GuardedProtocol, "on_body", count_pieces)
    text = b'{"input":"t10"%b}' % (b" " * 60_000)
    is_over = False
    bench.loop.call_soon_threadsafe(count_turns)
    try:
        with bench.connect() as connection:
            connection.sendall(CHUNKED + b"".join(b"1\r\n%c\r\n" % each for each in text) + b"0\r\n\r\n")
            assert read_answer(connection)[0] == 200
    finally:
        is_over = True
    assert pieces.total() == len(text)
    assert max(pieces.values()) < 4_000


def test_a_body_above_the_limit_gets_its_answer_though_it_is_still_coming() -> None:
    """The client sends on, and reads only then; its connection must not be reset before it has the answer."""
    with running_frontend(HttpSettings(max_body_bytes=1000)) as bench:
        for _ in range(20):
            answer = bench.post(b" " * 3_000_000)
            assert answer.status_code == 413
            assert answer.headers["connection"] == "close"


def test_expect_continue_is_answered_by_what_comes_of_it() -> None:
    with running_frontend(HttpSettings(max_body_bytes=1000)) as bench:
        with bench.connect() as connection:
            connection.sendall(POST.replace(b"Host: x\r\n", b"Host: x\r\nExpect: 100-continue\r\n"))
            assert connection.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
            connection.sendall(BODY)
            assert read_answer(connection)[0] == 200
        with bench.connect() as connection:
            connection.sendall(
                POST.replace(b"Host: x\r\nContent-Length: 15", b"Host: x\r\nExpect: 100-continue\r\nContent-Length: 2000")
            )
            assert read_answer(connection)[0] == 413


def test_a_client_that_half_closes_is_gone() -> None:
    """An end of sending is all that is seen of a client that leaves, so its work is dropped."""
    with running_frontend(is_holding=True) as bench, bench.connect() as connection:
        connection.sendall(POST + BODY)
        wait_until(lambda: bench.broker.received)
        connection.shutdown(socket.SHUT_WR)
        wait_until(lambda: bench.broker.cancelled == [bench.broker.received[0].request.rid])
        assert read_all(connection) == b""


def test_a_client_that_half_closes_is_no_harm(bench: Bench) -> None:
    with bench.connect() as connection:
        connection.sendall(POST)
        connection.shutdown(socket.SHUT_WR)
        read_all(connection)
    assert bench.post({"input": "t10"}).status_code == 200


# ---- keys and origins ----


def test_keys_guard_all_but_health() -> None:
    with running_frontend(keys=Keys(["one", "zwei-ä"])) as bench:
        for headers in (
            {},
            {"authorization": "Bearer two"},
            {"authorization": "one"},
            {"authorization": "Basic one"},
            {"authorization": "Bearer"},
        ):
            answer = bench.post({"input": "t10"}, headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["code"] == "invalid_api_key"
        for several in (["Bearer one", "Bearer two"], ["Bearer two", "Bearer one"], ["Bearer one", "Bearer one"]):
            assert bench.get("/v1/models", headers=[("authorization", value) for value in several]).status_code == 401
        assert bench.get("/v1/models").status_code == 401
        assert bench.get("/status").status_code == 401
        assert bench.get("/nope").status_code == 401
        assert (bench.get("/health").status_code, bench.get("/live/").status_code) == (200, 200)
        for key in ("Bearer one", "bearer  one", "Bearer zwei-ä"):
            assert bench.post({"input": "t10"}, headers={"authorization": key.encode()}).status_code == 200


PREFLIGHT = {
    "origin": "http://app.test",
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


@pytest.mark.parametrize(("allowed", "expected"), [(("*",), "*"), (("http://app.test", "http://b.test"), "http://app.test")])
def test_pages_of_allowed_origins_may_call(allowed: tuple[str, ...], expected: str) -> None:
    with running_frontend(HttpSettings(cors_allow_origin=allowed), keys=Keys(["k"])) as bench:
        answer = httpx.options(f"{bench.url}/v1/embeddings", headers=PREFLIGHT)
        assert answer.status_code == 204
        assert answer.headers["access-control-allow-origin"] == expected
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert answer.headers["access-control-allow-headers"] == "authorization,content-type"
        assert answer.headers["x-request-id"]
        key = {"authorization": "Bearer k", "origin": "http://app.test"}
        for body, headers, status in (({"input": "t10"}, key, 200), ({}, key, 400), ({}, {"origin": "http://app.test"}, 401)):
            answer = bench.post(body, headers=headers)
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == expected


def test_refusals_before_any_route_carry_the_id_and_the_origin() -> None:
    """Every answer has the caller's own id, and without the origin's header a page would not see what went wrong."""
    own = b"X-Request-Id: mine\r\nOrigin: http://app.test\r\n"
    head = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\n" + own
    limits = HttpSettings(cors_allow_origin=("http://app.test",), receive_timeout=0.3)
    with running_frontend(limits) as bench:
        for sent, status in (
            (head + b"X: " + b"a" * 20_000, 431),
            (head + b"Broken\r\n\r\n", 400),
            (head + b"X: y\r\n", 408),
            (head + b"Content-Length: 15\r\n\r\n{", 408),
            (head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        ):
            headers = refusal(bench.exchange(sent), status)
            assert (headers["x-request-id"], headers["access-control-allow-origin"]) == ("mine", "http://app.test")
        other = refusal(bench.exchange(head.replace(b"app.test", b"b.test") + b"Broken\r\n\r\n"), 400)
        assert "access-control-allow-origin" not in other


def test_other_origins_may_not() -> None:
    with running_frontend(HttpSettings(cors_allow_origin=("http://other.test",))) as bench:
        answer = httpx.options(f"{bench.url}/v1/embeddings", headers=PREFLIGHT)
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "origin_not_allowed"
        assert "access-control-allow-origin" not in bench.post({"input": "t10"}, headers={"origin": "http://app.test"}).headers


def test_without_the_setting_there_is_no_cors(bench: Bench) -> None:
    answer = httpx.options(f"{bench.url}/v1/embeddings", headers=PREFLIGHT)
    assert answer.status_code == 405
    assert not [name for name in answer.headers if name.startswith("access-control")]
