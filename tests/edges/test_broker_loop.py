"""The broker as a process: real sockets, real pids, fake workers and frontends around it."""

from __future__ import annotations

import os
import resource
import secrets
import select
import signal
import socket as sockets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from random import Random

import msgspec
import psutil
import pytest
import zmq

from broker_process import Broker
from fakes import (
    MODEL,
    FakeBatchError,
    FakeFrontend,
    FakeRequestError,
    FakeWorker,
    Row,
    encode_batch,
    spawn_worker,
    vector_of,
)
from packhorse_broker import events as e
from packhorse_broker.doors import open_doors
from packhorse_broker.events import WorkerLost
from packhorse_broker.loop import BrokerLoop
from packhorse_broker.processes import ProcessWatch
from packhorse_broker.timer import TimerFd
from packhorse_shared import messages as m
from packhorse_shared.codec import Decoder, encode
from packhorse_shared.errors import EXIT_CANNOT_START
from packhorse_shared.run_dir import RunDir
from packhorse_shared.sockets import MOST_WAITING_MESSAGES, new_identity, open_dealer, query_status
from packhorse_shared.watchdog import Watchdog
from waiting import wait_until


@pytest.fixture
def start(run_dir: RunDir) -> Iterator[type[Broker]]:
    """Starts brokers that are ended after the test."""
    started: list[Broker] = []

    def begin(*flags: str) -> Broker:
        started.append(Broker(run_dir, *flags))
        return started[-1].wait_listening()

    yield begin  # type: ignore[misc]  # called like the class, with flags only
    for each in started:
        each.end()


def test_a_round_trip(start: type[Broker], run_dir: RunDir) -> None:
    start()
    with FakeFrontend(run_dir) as frontend, FakeWorker(run_dir) as worker:
        frontend.read_until(lambda: frontend.state is not None and frontend.state.ready_workers == 1)
        assert frontend.state is not None
        assert frontend.state.model == MODEL
        frontend.submit_many({1: [[5, 6, 7]], 2: [[1], [2, 2]]})
        assert frontend.wait(1) == [vector_of([5, 6, 7])]
        assert frontend.wait(2) == [vector_of([1]), vector_of([2, 2])]
        assert frontend.results == 1
        assert worker.batches == [[3, 1, 2]]


def test_payloads_of_megabytes(start: type[Broker], run_dir: RunDir) -> None:
    start("--max_num_tokens", "auto", "--max_batch_size", "64")
    inputs = [[index] * 20_000 for index in range(200)]

    def wide(batch: list[Sequence[int]], _work: m.Work) -> list[Row]:
        return [[float(ids[0])] * 5000 for ids in batch]

    with FakeFrontend(run_dir) as frontend, FakeWorker(run_dir, model=wide):
        frontend.submit(1, inputs)
        assert frontend.wait(1, within_s=30) == [[float(index)] * 5000 for index in range(200)]


def test_64_singles_at_once_ride_together(start: type[Broker], run_dir: RunDir) -> None:
    start("--max_batch_size", "16", "--max_queue_delay", "0.05")
    with FakeFrontend(run_dir) as frontend, FakeWorker(run_dir, slot=0) as first, FakeWorker(run_dir, slot=1) as second:
        for rid in range(64):
            frontend.submit(rid, [[rid + 1] * (1 + rid % 60)])
        for rid in range(64):
            assert frontend.wait(rid) == [vector_of([rid + 1] * (1 + rid % 60))]
        batches = first.batches + second.batches
        assert 64 / len(batches) >= 8
        report = frontend.status()
        assert sum(worker.inputs for worker in report.workers) == 64
        assert sum(worker.batches for worker in report.workers) == len(batches)


def test_sub_millisecond_delays_end(start: type[Broker], run_dir: RunDir) -> None:
    start("--max_queue_delay", "0.0001")
    with FakeFrontend(run_dir) as frontend, FakeWorker(run_dir):
        waits = []
        for rid in range(200):
            frontend.submit(rid, [[1]])
            began = time.monotonic()
            frontend.wait(rid)
            waits.append(time.monotonic() - began)
    # A whole millisecond of poll() granularity would be in every one of them.
    assert sorted(waits)[10] < 0.5


def test_a_killed_worker_loses_nothing(start: type[Broker], run_dir: RunDir) -> None:
    broker = start("--max_batch_size", "4")
    doomed = spawn_worker(run_dir, slot=0, seconds_per_batch=30)
    try:
        with FakeFrontend(run_dir) as frontend:
            frontend.read_until(lambda: frontend.state is not None and frontend.state.ready_workers == 1)
            frontend.submit(1, [[7]])
            wait_until(lambda: frontend.status().workers[0].in_flight == 1)
            with FakeWorker(run_dir, slot=1):
                doomed.send_signal(signal.SIGKILL)
                assert frontend.wait(1) == [vector_of([7])]
                states = {worker.id: worker.state for worker in frontend.status().workers}
                assert states == {"worker-0": "gone", "worker-1": "ready"}
        assert "worker lost: its process ended" in broker.log()
    finally:
        doomed.kill()
        doomed.wait()


def test_an_input_that_kills_workers_fails_alone(start: type[Broker], run_dir: RunDir) -> None:
    start("--max_batch_size", "9", "--max_queue_delay", "0.2")
    workers = [spawn_worker(run_dir, slot=slot, poison=666) for slot in range(4)]
    try:
        with FakeFrontend(run_dir) as frontend:
            frontend.read_until(lambda: frontend.state is not None and frontend.state.ready_workers == 4)
            frontend.submit_many({rid: [[666 if rid == 4 else rid + 1]] for rid in range(9)})
            for rid in range(9):
                if rid == 4:
                    with pytest.raises(FakeRequestError) as caught:
                        frontend.wait(rid, within_s=30)  # the last worker is spared for ten seconds
                    assert caught.value.failure.code is m.ErrorCode.WORKER_DIED
                else:
                    assert frontend.wait(rid, within_s=30) == [vector_of([rid + 1])]
            dead = [worker for worker in workers if worker.poll() is not None]
            assert len(dead) == 3
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def test_a_silent_workers_work_is_moved_and_its_late_answer_ignored(start: type[Broker], run_dir: RunDir) -> None:
    start()
    proceed = threading.Event()

    def slow(inputs: list[Sequence[int]], work: m.Work) -> list[Row]:
        proceed.wait(10)
        return encode_batch(inputs, work)

    with FakeFrontend(run_dir) as frontend, FakeWorker(run_dir, slot=0, model=slow) as hung:
        frontend.submit(1, [[3, 4]])
        wait_until(lambda: hung.batches)
        with FakeWorker(run_dir, slot=1) as healthy:
            hung.freeze()
            assert frontend.wait(1) == [vector_of([3, 4])]
            assert healthy.batches == [[2]]
            proceed.set()
            hung.thaw()
            wait_until(lambda: [w.state for w in frontend.status().workers] == ["ready", "ready"], what="both ready")
    assert len(frontend.rows[1]) == 1


def test_a_stopped_worker_is_killed_in_time(start: type[Broker], run_dir: RunDir) -> None:
    start("--worker_timeout", "1.5")
    worker = spawn_worker(run_dir)
    try:
        with FakeFrontend(run_dir) as frontend:
            frontend.read_until(lambda: frontend.state is not None and frontend.state.ready_workers == 1)
            worker.send_signal(signal.SIGSTOP)
            assert worker.wait(10) == -signal.SIGKILL
    finally:
        worker.kill()
        worker.wait()


def test_failures_of_batch_and_input(start: type[Broker], run_dir: RunDir) -> None:
    start("--max_queue_delay", "0.02")

    def model(inputs: list[Sequence[int]], _work: m.Work) -> list[Row]:
        if any(ids[0] == 13 for ids in inputs):
            raise FakeBatchError(m.ErrorCode.FORWARD_FAILED, retryable=False)
        return [m.ErrorCode.NON_FINITE_OUTPUT if ids[0] == 99 else vector_of(ids) for ids in inputs]

    with FakeFrontend(run_dir) as frontend, FakeWorker(run_dir, model=model):
        frontend.submit_many({1: [[99]], 2: [[5]], 3: [[6], [99]]})
        assert frontend.wait(2) == [vector_of([5])]
        for rid, index in ((1, 0), (3, 1)):
            with pytest.raises(FakeRequestError) as caught:
                frontend.wait(rid)
            assert (caught.value.failure.code, caught.value.failure.index) == (m.ErrorCode.NON_FINITE_OUTPUT, index)
        frontend.submit(4, [[13]])
        with pytest.raises(FakeRequestError) as caught:
            frontend.wait(4)
        assert caught.value.failure.code is m.ErrorCode.FORWARD_FAILED


def test_a_frontends_death_drops_its_queue(start: type[Broker], run_dir: RunDir) -> None:
    start()
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        with FakeFrontend(run_dir, index=0) as other, FakeFrontend(run_dir, index=1, pid=sleeper.pid) as dying:
            dying.submit(1, [[1]] * 10, resubmitted=True)
            wait_until(lambda: other.status().queue.inputs == 10)
            sleeper.kill()
            wait_until(lambda: other.status().queue.inputs == 0, what="the queue of a dead frontend is dropped")
    finally:
        sleeper.kill()
        sleeper.wait()


def test_strangers_are_asked_to_introduce_themselves(start: type[Broker], run_dir: RunDir) -> None:
    start()
    stranger = FakeFrontend(run_dir)
    stranger.submit(1, [[1]])
    stranger.read_until(lambda: len(stranger.introductions) == 1)
    stranger.greet()
    assert stranger.state is not None
    assert stranger.state.boot_id == stranger.introductions[0].boot_id
    stranger.__exit__(None, None, None)


def test_workers_that_do_not_fit_are_refused(start: type[Broker], run_dir: RunDir) -> None:
    start()
    intruder = FakeWorker(run_dir, slot=5, token="0" * 64).start(wait=False)
    wait_until(lambda: intruder.refused)
    assert intruder.refused is not None
    assert "token" in intruder.refused
    with FakeWorker(run_dir, slot=0):
        other = FakeWorker(run_dir, slot=1, facts=msgspec.structs.replace(MODEL, fingerprint="other")).start(wait=False)
        wait_until(lambda: other.refused)
        assert other.refused is not None
        assert "another model" in other.refused
        other.stop()
    intruder.stop()


@pytest.mark.parametrize("kind", [b"\x21", b"\x22"])
def test_a_worker_whose_hello_is_of_another_version_is_told_so(start: type[Broker], run_dir: RunDir, kind: bytes) -> None:
    """Messages of other versions have other fields: only their first one, the version, can be believed."""
    broker = start()
    token = run_dir.token()
    with FakeFrontend(run_dir) as frontend, FakeWorker(run_dir):
        context = zmq.Context()
        socket = open_dealer(context, run_dir.workers_endpoint, new_identity("worker", 7))
        for other in ([1, token, -1, os.getpid(), 5, "cpu", ["tiny", 32], [32, 8192]], [m.PROTOCOL_VERSION + 1, {"a": 1}]):
            socket.send_multipart([kind, msgspec.msgpack.encode(other), b""])
            assert socket.poll(5000), broker.log()
            refused, _ = Decoder(m.Refused).decode(socket.recv_multipart())
            assert refused.reason.startswith(f"it speaks protocol {other[0]}, this broker {m.PROTOCOL_VERSION}")
        for malformed in ([m.PROTOCOL_VERSION, token], ["1", token], [True, token], [1.0], [-1], [1 << 63], [], {"a": 1}, 1):
            socket.send_multipart([kind, msgspec.msgpack.encode(malformed), b""])
        frontend.submit(1, [[4, 4]])
        assert frontend.wait(1) == [vector_of([4, 4])]
        wait_until(lambda: "malformed message dropped" in broker.log())
        assert not socket.poll(0)
        context.destroy(linger=0)
    assert broker.log().count("worker refused: it speaks protocol") == 2


def test_malformed_messages_are_counted_logged_and_dropped(start: type[Broker], run_dir: RunDir) -> None:
    broker = start()
    random = Random(7)
    with FakeFrontend(run_dir) as frontend, FakeWorker(run_dir):
        good = encode(m.Submit([m.SubmittedRequest(1, [2], 1000)]), b"\0" * 8)
        bad: list[list[bytes]] = [
            [],
            [b""],
            [b"", b"", b""],
            [b"\x02"],
            [b"\xff", b"\x90", b""],
            [b"\x02", b"\xc1", b""],
            [b"\x02", bytes(good[1]), b"\0" * 7],
            [b"\x24", bytes(good[1]), b""],
            [b"\x02", b"\x90" * 70_000, b""],
            [b"x"] * 50,
            *([random.randbytes(random.randrange(40)) for _ in range(3)] for _ in range(300)),
        ]
        for frames in bad:
            frontend.socket.send_multipart(frames or [b""])
        frontend.submit(9, [[4, 4]])
        assert frontend.wait(9) == [vector_of([4, 4])]
    wait_until(lambda: "malformed message dropped" in broker.log())
    assert broker.log().count("malformed message dropped") <= 3
    assert broker.process.poll() is None


@pytest.mark.parametrize("pid", [1 << 31, 1 << 62, (1 << 63) - 1])
def test_a_hello_with_an_impossible_pid_is_malformed(start: type[Broker], run_dir: RunDir, pid: int) -> None:
    broker = start()
    with FakeFrontend(run_dir) as frontend, FakeWorker(run_dir):
        frontend.socket.send_multipart([b"\x01", msgspec.msgpack.encode([m.PROTOCOL_VERSION, 0, pid]), b""])
        frontend.submit(1, [[4, 4]])
        assert frontend.wait(1) == [vector_of([4, 4])]
    wait_until(lambda: "malformed message dropped" in broker.log())
    assert broker.process.poll() is None


def test_frontends_that_leave_take_their_watch_along(start: type[Broker], run_dir: RunDir) -> None:
    """Their process may live on (here it is the test's own): what was opened for them must not stay open."""
    broker = psutil.Process(start().process.pid)
    context = zmq.Context()
    sockets = [open_dealer(context, run_dir.frontends_endpoint, new_identity("frontend", 0)) for _ in range(30)]
    for socket in sockets:
        socket.send_multipart(encode(m.Ping()))
    assert all(socket.poll(5000) for socket in sockets)
    before = broker.num_fds()
    for socket in sockets:
        socket.send_multipart(encode(m.FrontendHello(m.PROTOCOL_VERSION, 0, os.getpid())))
    wait_until(lambda: broker.num_fds() >= before + len(sockets), what="a watch for each")
    context.destroy(linger=0)
    wait_until(lambda: broker.num_fds() <= before + 1, what="the connections to be closed")
    # A new worker is news for every frontend: that is when the broker finds out.
    with FakeWorker(run_dir):
        wait_until(lambda: broker.num_fds() <= before - len(sockets) + 5, what="the watches to be closed")


def test_a_peer_that_reads_nothing_is_given_up(run_dir: RunDir) -> None:
    """What waits for it would fill the memory."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    doors = open_doors(context, run_dir)
    door, deaf = doors[1], context.socket(zmq.DEALER)
    try:
        deaf.set(zmq.RCVHWM, 1)
        deaf.set(zmq.IDENTITY, b"deaf")
        deaf.connect(run_dir.frontends_endpoint)
        deaf.send_multipart(encode(m.StatusQuery()))
        assert door.socket.poll(5000)
        assert door.receive() is not None
        sent = 0
        while door.send(b"fdeaf", m.Introduce(1)):
            sent += 1
            assert sent < 2 * MOST_WAITING_MESSAGES
        assert sent >= MOST_WAITING_MESSAGES
    finally:
        for each in (deaf, *(each.socket for each in doors)):
            each.close(linger=0)
        context.term()


class _SlowCore:
    """Stands in for the broker's core: the first event takes its time, as if the process were stopped meanwhile."""

    def __init__(self) -> None:
        self.seen: list[e.Event] = []

    def handle(self, event: e.Event, _now: float) -> list[e.Action]:
        self.seen.append(event)
        if isinstance(event, e.DrainBegan):
            time.sleep(0.6)
        return [e.Stop()] if isinstance(event, e.TimePassed) else []

    def next_deadline(self) -> float | None:
        return None


def test_a_stall_in_the_midst_of_a_wake_up_is_told_before_time_is_looked_at() -> None:
    """Else the silence of everybody who spoke meanwhile would count."""
    ours, theirs = sockets.socketpair()
    timer, watch = TimerFd(), ProcessWatch()
    ours.setblocking(False)
    theirs.send(bytes([signal.SIGTERM]))
    core = _SlowCore()
    loop = BrokerLoop(core, [], b"", timer=timer, watch=watch, signals=ours, watchdog=Watchdog())  # type: ignore[arg-type]
    with ours, theirs:
        assert loop.run() == 0
    timer.close()
    assert [type(event) for event in core.seen] == [e.DrainBegan, e.BrokerStalled, e.TimePassed]
    assert isinstance(core.seen[1], e.BrokerStalled)
    assert 0.55 < core.seen[1].stalled_s < 5


def test_anyone_may_ask_for_the_status(start: type[Broker], run_dir: RunDir) -> None:
    start("--max_queue_size", "17")
    report = query_status(run_dir, timeout_s=5)
    assert report.queue.limit == 17
    assert report.workers == []
    assert report.model is None


def test_loading_workers_are_told_apart(start: type[Broker], run_dir: RunDir) -> None:
    start()
    with FakeFrontend(run_dir) as frontend:
        worker = FakeWorker(run_dir, announce_only=True).start(wait=False)
        frontend.read_until(lambda: frontend.state is not None and frontend.state.loading_workers == 1)
        frontend.submit(1, [[1]])
        with pytest.raises(FakeRequestError) as caught:
            frontend.wait(1)
        assert caught.value.failure.code is m.ErrorCode.LOADING
        worker.stop()


def test_a_drain_finishes_what_was_accepted(start: type[Broker], run_dir: RunDir) -> None:
    broker = start("--max_batch_size", "1")
    proceed = threading.Event()

    def gated(inputs: list[Sequence[int]], work: m.Work) -> list[Row]:
        proceed.wait(10)
        return encode_batch(inputs, work)

    with FakeFrontend(run_dir) as frontend, FakeWorker(run_dir, model=gated) as worker:
        frontend.submit(1, [[1], [2], [3], [4]])
        wait_until(lambda: worker.batches)
        broker.process.send_signal(signal.SIGTERM)
        frontend.read_until(lambda: frontend.state is not None and frontend.state.draining)
        frontend.submit(2, [[1]])
        with pytest.raises(FakeRequestError) as caught:
            frontend.wait(2)
        assert caught.value.failure.code is m.ErrorCode.DRAINING
        proceed.set()
        assert frontend.wait(1) == [vector_of([index]) for index in (1, 2, 3, 4)]
        assert broker.process.wait(10) == 0
        assert worker.is_gone.wait(10)
    assert "drained" in broker.log()


def test_a_second_signal_forces(start: type[Broker], run_dir: RunDir) -> None:
    broker = start()
    hold = threading.Event()

    def stuck(inputs: list[Sequence[int]], work: m.Work) -> list[Row]:
        hold.wait(10)
        return encode_batch(inputs, work)

    with FakeFrontend(run_dir) as frontend, FakeWorker(run_dir, model=stuck) as worker:
        frontend.submit(1, [[1]])
        wait_until(lambda: worker.batches)
        broker.process.send_signal(signal.SIGINT)
        frontend.read_until(lambda: frontend.state is not None and frontend.state.draining)
        broker.process.send_signal(signal.SIGTERM)
        assert broker.process.wait(10) == 128 + signal.SIGTERM
        hold.set()


def test_a_worker_that_stops_hands_back_what_it_has_not_begun(start: type[Broker], run_dir: RunDir) -> None:
    start("--max_batch_size", "1")
    proceed = threading.Event()

    def gated(inputs: list[Sequence[int]], work: m.Work) -> list[Row]:
        proceed.wait(10)
        return encode_batch(inputs, work)

    with FakeFrontend(run_dir) as frontend:
        leaving = FakeWorker(run_dir, slot=0, model=gated).start()
        frontend.submit(1, [[1], [2], [3]])
        wait_until(lambda: len(leaving.batches) == 2)
        stopping = threading.Thread(target=leaving.stop)
        stopping.start()
        wait_until(lambda: frontend.status().workers[0].state == "draining")
        with FakeWorker(run_dir, slot=1) as other:
            proceed.set()
            assert frontend.wait(1) == [vector_of([index]) for index in (1, 2, 3)]
            assert len(other.batches) == 2
        stopping.join(10)


def test_a_restarted_broker_gets_its_workers_back(start: type[Broker], run_dir: RunDir) -> None:
    first = start()
    with FakeFrontend(run_dir) as frontend, FakeWorker(run_dir) as worker:
        first.process.kill()
        first.process.wait()
        first.log_file.unlink()
        worker.is_joined.clear()
        start()
        assert worker.is_joined.wait(10)
        frontend.greet()
        frontend.submit(1, [[8]])
        assert frontend.wait(1) == [vector_of([8])]


def test_one_broker_per_run_directory(start: type[Broker], run_dir: RunDir) -> None:
    start()
    second = Broker(run_dir)
    try:
        assert second.process.wait(10) == EXIT_CANNOT_START
        errors = [line for line in second.log().splitlines() if " ERROR " in line]
        assert len(errors) == 1
        assert "another Packhorse runs in" in errors[0]
    finally:
        second.end()
    assert query_status(run_dir, timeout_s=5).workers == []


def test_what_is_left_in_the_run_directory(start: type[Broker], run_dir: RunDir) -> None:
    start("--max_batch_size", "5", "--port", "8123", "--api_key", secrets.token_hex(8))
    server = run_dir.read_server()
    assert (server.url, server.supervisor_url) == ("http://127.0.0.1:8123", None)
    assert run_dir.read_settings().batching.max_batch_size == 5
    assert run_dir.read_settings().http.api_key == ()
    for file in (run_dir.settings_file, run_dir.server_file, run_dir.token_file):
        assert file.stat().st_mode & 0o077 == 0


def test_it_may_open_as_many_files_as_the_machine_allows(start: type[Broker]) -> None:
    """Else some hundred strangers at its tcp port would be its end."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        broker = psutil.Process(start().process.pid)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    limit = broker.rlimit(psutil.RLIMIT_NOFILE)[0]
    assert limit == min(1 << 16, hard if hard != resource.RLIM_INFINITY else 1 << 16)


def test_an_idle_broker_does_not_spin(start: type[Broker], run_dir: RunDir) -> None:
    broker = start()
    with FakeFrontend(run_dir) as frontend, FakeWorker(run_dir):
        frontend.submit(1, [[1]])
        frontend.wait(1)
        process = psutil.Process(broker.process.pid)
        before, began = sum(process.cpu_times()[:2]), time.monotonic()
        wait_until(lambda: time.monotonic() - began > 2.0)
        assert sum(process.cpu_times()[:2]) - before < 0.2
        assert process.memory_info().rss < 200 << 20


def test_the_timer_is_readable_when_its_time_has_come() -> None:
    timer = TimerFd()
    try:
        timer.arm(time.monotonic() + 3600)
        assert not _is_readable(timer.descriptor, 0)
        timer.arm(time.monotonic() + 0.0005)
        assert _is_readable(timer.descriptor, 5)
        timer.clear()
        assert not _is_readable(timer.descriptor, 0)
        timer.arm(0.0)
        assert _is_readable(timer.descriptor, 5)
        timer.arm(None)
        assert not _is_readable(timer.descriptor, 0)
    finally:
        timer.close()


def test_process_watch_tells_the_end_and_never_kills_a_stranger() -> None:
    watch = ProcessWatch()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        descriptor = watch.add(b"w", child.pid, WorkerLost(b"w", "ended"))
        assert descriptor is not None
        assert watch.add(b"w", child.pid, WorkerLost(b"w", "ended")) is None
        assert watch.add(b"v", 0, WorkerLost(b"v", "ended")) is None
        assert not watch.kill(b"v")
        assert watch.kill(b"w")
        assert _is_readable(descriptor, 5)
        assert watch.ended(descriptor) == WorkerLost(b"w", "ended")
        assert not watch.kill(b"w")
        child.wait()
        with pytest.raises(ProcessLookupError):
            watch.add(b"w", child.pid, WorkerLost(b"w", "ended"))
    finally:
        child.kill()
        child.wait()
        watch.close()


def _is_readable(descriptor: int, within_s: float) -> bool:
    return bool(select.select([descriptor], [], [], within_s)[0])
