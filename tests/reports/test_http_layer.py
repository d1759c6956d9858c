"""HTTP as proxies, browsers and pooled clients speak it, with the flags that are about it."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from aims import Aims
from edges.frontend_thread import read_answer
from edges.test_http_protocol import PREFLIGHT
from raw_http import connect, post
from reports.asking import ask
from stack import Stack
from standin_stack import StandInFactory
from waiting import wait_until

pytestmark = pytest.mark.process

KEEP_ALIVE_S = 3
OTHERS_CLOSE_AFTER_S = 5


@pytest.fixture(scope="module", autouse=True)
def idle_connection(stack: Stack) -> Iterator[tuple[socket.socket, float]]:
    """A connection on which one request was answered before any test of the file, and when: they run while it idles."""
    with connect(stack.port) as connection:
        connection.sendall(post())
        assert read_answer(connection)[0] == 200
        yield connection, time.monotonic()


@pytest.fixture(scope="module")
def flagged(make_standin: StandInFactory) -> Stack:
    """A server that closes idle connections soon, and that pages of every origin may call."""
    return make_standin(f"--keep_alive={KEEP_ALIVE_S}", "--cors_allow_origin=*").start().wait_ready()


def test_pages_of_every_origin(flagged: Stack, stack: Stack) -> None:
    """A star that is taken for a flag and lets no page in; answers that a page may read, but not their errors."""
    answer = flagged.http.options("/v1/embeddings", headers=PREFLIGHT)
    assert answer.status_code in (200, 204)
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "POST" in answer.headers["access-control-allow-methods"]
    allowed = answer.headers["access-control-allow-headers"].lower().replace(" ", "").split(",")
    assert {"authorization", "content-type"} <= set(allowed)
    origin = {"origin": PREFLIGHT["origin"]}
    for body, status in (({"input": "t10"}, 200), ({}, 400)):
        answer = ask(flagged, body, headers=origin)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, "*")
    assert "access-control-allow-origin" not in ask(stack, {"input": "t10"}, headers=origin).headers


def test_the_time_that_a_connection_is_kept_follows_its_flag(flagged: Stack, aims: Aims) -> None:
    """A flag for idle connections that does nothing."""
    with connect(flagged.port) as connection:
        connection.sendall(post())
        assert read_answer(connection)[0] == 200
        began = time.monotonic()
        assert connection.recv(1) == b""
        kept_s = time.monotonic() - began
    assert kept_s > KEEP_ALIVE_S - 0.1
    aims.note(f"an idle connection with --keep_alive {KEEP_ALIVE_S}", kept_s, "s", at_most=5)


def test_an_idle_connection_is_kept(idle_connection: tuple[socket.socket, float], soak: bool) -> None:
    """Connections closed after five idle seconds, under clients and proxies that keep theirs for a minute."""
    connection, since = idle_connection
    until = since + (20 if soak else OTHERS_CLOSE_AFTER_S + 1)
    wait_until(lambda: time.monotonic() > until, 25, "the idle time")
    connection.sendall(post())
    assert read_answer(connection)[0] == 200
