"""Whoever reaches the broker's sockets (the same user, or a broken part of ours): it is told no, counted, and harms nobody."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from fakes import FakeWorker
from footprint import Settled
from forgery import Forger, is_malformed, pack
from harm import log_of, logged, ready_workers, wait_ready_workers
from load import Load
from packhorse_shared import messages as m
from packhorse_shared.codec import Decoder, encode
from packhorse_shared.run_dir import RunDir
from packhorse_shared.sockets import new_identity, open_dealer
from questions import random_questions
from standin import CANARY, DIMENSION, facts_of, row_of
from standin_stack import StandInFactory, StandInStack
from waiting import wait_until

pytestmark = pytest.mark.process

SEED = 67
MESSAGES = 1000
"""From each of four peers."""
GUESSES = 25


FROM_FRONTENDS = (m.FrontendHello, m.Submit, m.Cancel, m.Ping, m.StatusQuery)
FROM_WORKERS = (m.WorkerAnnounce, m.WorkerHello, m.Beat, m.Done, m.BatchFailed, m.Draining, m.Bye, m.SettingsQuery)
"""What the broker's sockets take: all else is malformed there."""


@pytest.fixture(scope="module")
def stack(make_shared_standin: StandInFactory) -> StandInStack:
    return make_shared_standin("--workers_per_device=2", "--batch_timeout=2").start().wait_ready(2)


@pytest.fixture
def run_dir(stack: StandInStack) -> RunDir:
    return RunDir(stack.run_dir)


@contextlib.contextmanager
def dealer(endpoint: str, role: str) -> Iterator[Any]:
    context: zmq.Context[Any] = zmq.Context()
    try:
        yield open_dealer(context, endpoint, new_identity(role, 7))
    finally:
        context.destroy(linger=1000)


def test_4000_malformed_messages(stack: StandInStack, run_dir: RunDir, settled: Settled, tmp_path: Path) -> None:
    """From strangers and from peers that the broker knows, on both of its sockets; and bytes that are no ZeroMQ at all."""
    bomb = tmp_path / "unpickled"
    forger = Forger(SEED, bomb)
    pids = {process.pid for process in stack.processes()}
    announce = m.WorkerAnnounce(m.PROTOCOL_VERSION, run_dir.token(), 7, 0, secrets.randbits(63), "forged")
    counted = 0
    with settled(stack), Load(stack.port, random_questions(SEED), rate=150, seed=SEED) as load:
        for endpoint, kinds, hello, farewell in (
            (run_dir.frontends_endpoint, FROM_FRONTENDS, m.FrontendHello(m.PROTOCOL_VERSION, 7, 0), m.Cancel([1])),
            (run_dir.workers_endpoint, FROM_WORKERS, announce, m.Bye("")),
        ):
            decoder = Decoder(*kinds)
            for is_known in (False, True):
                with dealer(endpoint, "forged") as peer:
                    if is_known:
                        peer.send_multipart(encode(hello))
                    for _ in range(MESSAGES):
                        frames = forger.frames()
                        counted += is_malformed(decoder, frames)
                        peer.send_multipart(frames)
                    if is_known:
                        peer.send_multipart(encode(farewell))
        _send_no_zeromq(stack, forger)
        load.wait_for(150)
        wait_until(lambda: logged(stack, r"dropped_in_all=(\d+)")[-1:] == [str(counted)], 20, f"{counted} to be counted")
    report = load.report()
    print(f"seed {SEED}: {report}, {counted} malformed")
    report.assert_invariant()
    assert set(report.counts) == {200}
    assert counted > 3 * MESSAGES
    assert not bomb.exists()
    assert {process.pid for process in stack.processes()} == pids


def _send_no_zeromq(stack: StandInStack, forger: Forger) -> None:
    for name in ("frontends.ipc", "workers.ipc"):
        for size in range(1, 50):
            with socket.socket(socket.AF_UNIX) as raw, contextlib.suppress(BrokenPipeError, ConnectionResetError):
                raw.connect(str(stack.run_dir / name))
                raw.sendall(forger.stream(size))


def test_others_requests_and_batches_are_out_of_reach(stack: StandInStack, run_dir: RunDir, settled: Settled) -> None:
    """Well-formed messages that guess others' ids: cancels of their requests, wrong rows for their batches."""
    announce = m.WorkerAnnounce(m.PROTOCOL_VERSION, run_dir.token(), 7, 0, secrets.randbits(63), "forged")
    stack.set_traps(batch_s=0.02)
    with (
        settled(stack),
        Load(stack.port, random_questions(SEED, inputs=2), rate=150, seed=SEED) as load,
        dealer(run_dir.frontends_endpoint, "forged") as frontend,
        dealer(run_dir.workers_endpoint, "forged") as worker,
    ):
        frontend.send_multipart(encode(m.FrontendHello(m.PROTOCOL_VERSION, 7, 0)))
        worker.send_multipart(encode(m.Beat(0, 0.0, 1)))
        assert worker.poll(5000)
        boot_id = Decoder(m.Introduce).decode(worker.recv_multipart())[0].boot_id
        worker.send_multipart(encode(announce))
        for _ in range(GUESSES):
            # The broker numbers its batches, and a frontend its requests: those open now are near these.
            begun = sum(len(batch.ids) > 0 and batch.ids != [[*CANARY]] for batch in stack.computed())
            for number in range(max(1, begun - 20), begun + 40):
                rows = [DIMENSION] * (1 + number % 4)
                frontend.send_multipart(encode(m.Cancel([number, 2 * number])))
                worker.send_multipart(encode(m.Done(boot_id, number, rows, [], 1.0), b"\0" * 4 * sum(rows)))
                failed = m.BatchFailed(boot_id, number, m.ErrorCode.FORWARD_FAILED, "forged", retryable=False)
                worker.send_multipart(encode(failed))
            load.wait_for(8)
        worker.send_multipart(encode(m.Bye("")))
    stack.set_traps(batch_s=0.002)
    report = load.report()
    print(f"seed {SEED}: {report}")
    report.assert_invariant()
    assert set(report.counts) == {200}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"token": "not-the-token"}, "its token is not the one"),
        ({"version": m.PROTOCOL_VERSION + 1}, "it speaks protocol"),
        ({"model": "another"}, "it serves another model"),
    ],
)
def test_forged_hellos_get_no_work(stack: StandInStack, run_dir: RunDir, changes: dict[str, Any], words: str) -> None:
    facts = facts_of(stack.model.name) if stack.model else None
    if "model" in changes:
        facts = msgspec.structs.replace(facts, fingerprint=changes["model"])
    version, token = changes.get("version", m.PROTOCOL_VERSION), changes.get("token", run_dir.token())
    limits = m.WorkerLimits(4096, 1 << 22)
    hello = pack(m.WorkerHello, version, token, 7, 0, secrets.randbits(63), "forged", facts, limits)
    with (
        Load(stack.port, random_questions(SEED), clients=8, seed=SEED) as load,
        dealer(run_dir.workers_endpoint, "forged") as worker,
    ):
        decoder = Decoder(m.Join, m.Refused, m.Work, m.Drain, m.Quit, m.Introduce)
        answers: list[object] = []
        for _ in range(5):
            worker.send_multipart(hello)
            worker.send_multipart(encode(m.Beat(0, 0.0, 1)))
            load.wait_for(40)
            with contextlib.suppress(zmq.Again):
                while True:
                    answers.append(decoder.decode(worker.recv_multipart(zmq.NOBLOCK))[0])
    report = load.report()
    report.assert_invariant()
    assert set(report.counts) == {200}
    refusals = [each for each in answers if isinstance(each, m.Refused)]
    assert refusals
    assert all(words in each.reason for each in refusals)
    assert all(isinstance(each, m.Refused | m.Introduce) for each in answers), answers
    assert f"worker refused: {refusals[0].reason}" in log_of(stack)


def _too_few(inputs: list[Sequence[int]], _: m.Work) -> list[Sequence[float]]:
    return [row_of(ids).tolist() for ids in inputs][1:] or [[1.0] * DIMENSION] * 2


def _too_narrow(inputs: list[Sequence[int]], _: m.Work) -> list[Sequence[float]]:
    return [row_of(ids).tolist()[:-1] for ids in inputs]


def _not_finite(inputs: list[Sequence[int]], _: m.Work) -> list[Sequence[float]]:
    return [[float("nan"), *row_of(ids).tolist()[1:]] for ids in inputs]


def _fails_where_there_is_none(inputs: list[Sequence[int]], work: m.Work) -> list[Any]:
    return [*(row_of(ids).tolist() for ids in inputs), m.ErrorCode.FORWARD_FAILED]


@pytest.mark.parametrize("answers", [_too_few, _too_narrow, _not_finite, _fails_where_there_is_none])
def test_a_worker_whose_answers_do_not_fit(stack: StandInStack, run_dir: RunDir, settled: Settled, answers: Any) -> None:
    """It has the token and answers the canary: ours, but broken. Its requests fail or others do them; no vector is wrong."""
    assert stack.model is not None
    broken = FakeWorker(
        run_dir, slot=9, facts=facts_of(stack.model.name), limits=m.WorkerLimits(8, 512), model=answers, canary=row_of(CANARY)
    )
    with settled(stack):
        with Load(stack.port, random_questions(SEED, inputs=2), clients=24, seed=SEED) as load:
            with broken:
                wait_until(lambda: len(broken.batches) >= 3, 20, "work for the broken worker")
            wait_ready_workers(stack, 2)
            after = time.monotonic()
            load.wait_for(50)
        report = load.report()
    print(f"seed {SEED}: {report}")
    report.assert_invariant()
    assert set(report.counts) <= {200, 500}
    assert set(report.between(after, float("inf")).counts) == {200}
    assert len(ready_workers(stack)) == 2
