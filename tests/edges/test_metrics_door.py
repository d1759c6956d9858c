"""Metrics at the broker's door: anyone may ask, frontends may tell, and what is neither is dropped and counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from broker_process import Broker
from fakes import FakeFrontend, FakeWorker
from packhorse_shared import messages as m
from packhorse_shared import metrics
from packhorse_shared.codec import Decoder, encode
from packhorse_shared.meter import CELLS, FRONTEND_CELLS, cell_of
from packhorse_shared.run_dir import RunDir
from packhorse_shared.sockets import new_identity, open_dealer

OK = cell_of(metrics.REQUESTS, "embeddings", "200")
TALLY = b"\x06"


@pytest.fixture
def broker(run_dir: RunDir) -> Iterator[Broker]:
    started = Broker(run_dir).wait_listening()
    yield started
    started.end()


@pytest.fixture
def stranger(broker: Broker, run_dir: RunDir) -> Iterator[Any]:
    """A socket to the frontends' door that never says hello."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield open_dealer(context, run_dir.frontends_endpoint, new_identity("status", 0))
    context.destroy(linger=0)


def ask(socket: Any) -> list[float]:
    """What the broker tells of metrics; other messages are passed over."""
    socket.send_multipart(encode(m.MetricsQuery()))
    decoder = Decoder(m.MetricsReport, m.Introduce)
    while socket.poll(5000):
        message, _ = decoder.decode(socket.recv_multipart())
        if isinstance(message, m.MetricsReport):
            return message.values
    raise AssertionError("the broker does not answer")


def test_anyone_may_ask_for_the_metrics(stranger: Any, run_dir: RunDir) -> None:
    values = ask(stranger)
    assert len(values) == CELLS
    assert values[cell_of(metrics.WORKERS, "ready")] == 0
    with FakeFrontend(run_dir) as frontend, FakeWorker(run_dir):
        frontend.read_until(lambda: frontend.state is not None and frontend.state.ready_workers == 1)
        frontend.submit(1, [[5, 6], [7]])
        frontend.wait(1)
        values = ask(stranger)
    assert values[cell_of(metrics.WORKERS, "ready")] == 1
    assert values[cell_of(metrics.INPUTS)] == 2
    assert values[cell_of(metrics.TOKENS)] == 3
    assert values[cell_of(metrics.FRONTENDS)] == 1


def test_what_frontends_tell_counts_and_what_strangers_tell_does_not(stranger: Any, run_dir: RunDir) -> None:
    stranger.send_multipart(encode(m.Tally([(OK, 5.0)])))
    with FakeFrontend(run_dir) as one, FakeFrontend(run_dir, index=1) as other:
        for frontend in (one, other):
            frontend.read_until(lambda: frontend.state is not None)  # noqa: B023
            frontend.send(m.Tally([(OK, 2.0), (OK, 1.0)]))
            frontend.status()
        assert ask(stranger)[OK] == 6


@pytest.mark.parametrize(
    "changes",
    [
        [[cell_of(metrics.INPUTS), 1.0]],
        [[FRONTEND_CELLS, 1.0]],
        [[OK, -1.0]],
        [[OK, float("nan")]],
        [[OK, float("inf")]],
        [[OK, 1.0]] * (FRONTEND_CELLS + 1),
        [],
        "x",
    ],
)
def test_a_hostile_tally_of_a_known_frontend_is_dropped_and_counted(stranger: Any, run_dir: RunDir, changes: Any) -> None:
    with FakeFrontend(run_dir) as frontend:
        frontend.read_until(lambda: frontend.state is not None)
        before = ask(stranger)
        frontend.socket.send_multipart([TALLY, msgspec.msgpack.encode([changes]), b""])
        frontend.send(m.Tally([(OK, 1.0)]))
        frontend.status()
        after = ask(stranger)
    changed = {cell for cell in range(CELLS) if before[cell] != after[cell]} - {cell_of(metrics.UPTIME_SECONDS)}
    assert changed == {OK, cell_of(metrics.MALFORMED)}
    assert after[OK] == after[cell_of(metrics.MALFORMED)] == 1
