"""GET /, /docs and /openapi.json over a real socket: who may have them, when, and what is in them."""

from __future__ import annotations

import base64
import hashlib
import re
import signal
from collections.abc import Iterator

import pytest

from edges.frontend_thread import Bench, read_answer, running_frontend
from edges.test_http_broker import hold
from packhorse_frontend.layers.keys import Keys
from packhorse_shared.settings import HttpSettings
from waiting import wait_until

KEY = {"authorization": "Bearer secret"}
PAGES = ("/", "/docs")


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with running_frontend(HttpSettings(api_key=("secret",)), keys=Keys(["secret"])) as running:
        yield running


@pytest.mark.parametrize("path", PAGES)
def test_a_page_is_open_and_holds_no_data(bench: Bench, path: str) -> None:
    answer = bench.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["x-request-id"]
    assert "tiny" not in answer.text
    assert "<!-- s" not in answer.text, "a part was not put in"
    assert bench.get(path.rstrip("/") + "/").content == answer.content


def test_the_description_needs_a_key(bench: Bench) -> None:
    """It names the model."""
    assert bench.get("/openapi.json").status_code == 401
    assert bench.get("/openapi.json", headers=KEY).json()["info"]["title"] == "Packhorse"


@pytest.mark.parametrize("path", PAGES)
def test_a_page_lets_nothing_in_from_outside(bench: Bench, path: str) -> None:
    answer = bench.get(path)
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for kind in ("style", "script"):
        texts = re.findall(rf"<{kind}>(.*?)</{kind}>", answer.text, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
        assert policy[f"{kind}-src"] == " ".join(f"'sha256-{digest}'" for digest in digests)
        assert len(texts) == 1
    tags = re.sub(r"<(style|script)>.*?</\1>", "", answer.text, flags=re.DOTALL)
    assert not re.search(r"\son\w+=|\sstyle=|<script\s|<link[^>]+href=.?https?:", tags)
    assert "innerHTML" not in answer.text
    addresses = set(re.findall(r"https?://[\w./]+", answer.text))
    assert addresses <= {"http://www.w3.org/2000/svg"}, addresses


@pytest.mark.parametrize("path", [*PAGES, "/openapi.json"])
def test_a_browser_that_has_it_gets_no_body_again(bench: Bench, path: str) -> None:
    first = bench.get(path, headers=KEY)
    assert first.headers["cache-control"] == "no-cache"
    again = bench.get(path, headers={**KEY, "if-none-match": f'"other", W/{first.headers["etag"]}'})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    assert bench.get(path, headers={**KEY, "if-none-match": '"other"'}).status_code == 200


@pytest.mark.parametrize("path", [*PAGES, "/openapi.json"])
def test_head(bench: Bench, path: str) -> None:
    with bench.connect() as connection:
        connection.sendall(f"HEAD {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n\r\n".encode())
        connection.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
    heads = received.split(b"\r\n\r\n")
    assert heads[0].startswith(b"HTTP/1.1 200")
    assert heads[1].startswith(b"HTTP/1.1 200"), "the answer to HEAD had a body"
    assert f"content-length: {len(bench.get(path, headers=KEY).content)}".encode() in heads[0]


def test_the_status_page_is_there_while_the_server_loads() -> None:
    with running_frontend(wait=False, is_silent=True) as bench:
        for path in (*PAGES, "/openapi.json"):
            assert bench.get(path).status_code == 200


def test_the_status_page_is_there_while_the_server_stops() -> None:
    with running_frontend() as bench, bench.connect() as working:
        hold(bench)
        working.sendall(b'POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: 15\r\n\r\n{"input":"t10"}')
        wait_until(lambda: bench.broker.received)
        bench.signal(signal.SIGTERM)
        wait_until(lambda: bench.get("/health").status_code == 503)
        assert bench.get("/").status_code == 200
        assert bench.get("/docs").status_code == 503
        bench.broker.release()
        assert read_answer(working)[0] == 200


def test_behind_a_proxy_with_a_prefix() -> None:
    with running_frontend(HttpSettings(root_path="/encoders")) as bench:
        for prefix in ("", "/encoders"):
            assert bench.get(f"{prefix}/").text == bench.get(f"{prefix}").text
            assert bench.get(f"{prefix}/docs").status_code == 200
            assert bench.get(f"{prefix}/openapi.json").json()["servers"] == [{"url": "/encoders"}]
