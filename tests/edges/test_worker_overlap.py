"""A worker with two batches under way: the next one is begun while one runs, and another thread answers.

The model is a fake whose batches finish when the test says so. A batch is called by its number: its id, and the first word of
its first input.
"""

from __future__ import annotations

import logging
import os
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from packhorse_shared import messages as m
from packhorse_shared.run_dir import RunDir
from packhorse_worker.backend import DeviceLostError, EncodedBatch
from packhorse_worker.desk import Desk, Task
from packhorse_worker.loop import Link
from packhorse_worker.orders import Answer, Break, WorkerIdentity
from packhorse_worker.running import run_in_turn, run_overlapped
from waiting import wait_until
from worker_broker import BOOT, Broker
from worker_thread import FakeModel, RunningWorker

LOST = DeviceLostError("CUDA error: an illegal memory access was encountered")


class OverlappingModel(FakeModel):
    """Runs batches beside the host: each ends when its gate is opened."""

    overlaps = True

    def __init__(self, *, overlaps: bool = True) -> None:
        super().__init__()
        self.overlaps = overlaps
        self.begins: dict[int, threading.Event] = defaultdict(threading.Event)
        """Open the gate of a number in ``slow`` to let its start return."""
        self.ends: dict[int, threading.Event] = defaultdict(threading.Event)
        self.slow: set[int] = set()
        self.start_failures: dict[int, Exception] = {}
        self.end_failures: dict[int, Exception] = {}
        self.happened: list[tuple[str, int]] = []
        self.threads: set[tuple[str, str]] = set()

    def start_batch(self, ids: Sequence[NDArray[np.int32]], options: Sequence[m.EncodeOptions]) -> Callable[[], EncodedBatch]:
        number = int(ids[0][0])
        self.note("start", number)
        if number in self.slow:
            assert self.begins[number].wait(20)
        if (problem := self.start_failures.get(number)) is not None:
            raise problem
        outcome = super().start_batch(ids, options)

        def results() -> EncodedBatch:
            self.note("wait", number)
            assert self.ends[number].wait(20)
            self.note("end", number)
            if (problem := self.end_failures.get(number)) is not None:
                raise problem
            return outcome()

        return results

    def note(self, what: str, number: int) -> None:
        self.happened.append((what, number))
        self.threads.add((what, threading.current_thread().name))

    def has(self, what: str, number: int) -> bool:
        return (what, number) in self.happened

    def let_all_go(self) -> None:
        for number in range(1, 100):
            self.begins[number].set()
            self.ends[number].set()


@pytest.fixture
def broker(run_dir: RunDir) -> Iterator[Broker]:
    found = Broker(run_dir)
    yield found
    found.close()


@pytest.fixture
def model() -> OverlappingModel:
    return OverlappingModel()


@pytest.fixture
def worker(run_dir: RunDir, broker: Broker, model: OverlappingModel) -> Iterator[RunningWorker]:
    """A worker that has joined."""
    found = RunningWorker(run_dir, model=model)
    found.loaded.set()
    while not isinstance(broker.next()[0], m.WorkerHello):
        pass
    broker.say(m.Join(BOOT))
    yield found
    model.let_all_go()
    found.end()


def send_two(broker: Broker, model: OverlappingModel) -> None:
    """Batches 1 and 2, both begun, the first one waited for."""
    broker.send_work(1, [1])
    broker.send_work(2, [2])
    wait_until(lambda: model.has("start", 2) and model.has("wait", 1))


def told(broker: Broker, count: int) -> list[tuple[str, int]]:
    """Kind and batch of the next messages, beats left out."""
    messages = [broker.next()[0] for _ in range(count)]
    return [(type(each).__name__, each.batch_id) for each in messages]


def rest(broker: Broker) -> list[Any]:
    """What a worker that is gone had still said, beats left out."""
    found = []
    while broker._socket.poll(0):
        message, _ = broker.next(beats=True)
        if not isinstance(message, m.Beat):
            found.append(message)
    return found


# ---- two under way ----


def test_the_next_batch_is_begun_while_one_runs_and_answers_keep_their_order(
    worker: RunningWorker, broker: Broker, model: OverlappingModel
) -> None:
    send_two(broker, model)
    model.ends[2].set()
    assert not model.has("end", 1)
    model.ends[1].set()
    first, rows = broker.next()
    assert (first.batch_id, np.frombuffer(rows, "<f4").tolist()) == (1, [1, 0])
    second, rows = broker.next()
    assert (second.batch_id, np.frombuffer(rows, "<f4").tolist()) == (2, [2, 0])
    began_in = {thread for what, thread in model.threads if what == "start"}
    assert {thread for what, thread in model.threads if what == "end"} == {"finisher"}
    assert "finisher" not in began_in


@pytest.mark.parametrize("overlaps", [False, True])
def test_the_broker_is_told_whether_batches_overlap(broker: Broker, run_dir: RunDir, *, overlaps: bool) -> None:
    """It decides who is to blame when the worker dies."""
    worker = RunningWorker(run_dir, model=OverlappingModel(overlaps=overlaps))
    worker.loaded.set()
    try:
        while not isinstance(hello := broker.next()[0], m.WorkerHello):
            pass
        assert hello.limits == m.WorkerLimits(4, 256, overlaps)
    finally:
        worker.end()


def test_a_third_is_taken_when_the_first_is_answered(worker: RunningWorker, broker: Broker, model: OverlappingModel) -> None:
    send_two(broker, model)
    broker.send_work(3, [3])
    refused, _ = broker.next()
    assert (refused.batch_id, refused.code, refused.retryable) == (3, m.ErrorCode.NO_WORKER, True)
    model.ends[1].set()
    assert told(broker, 1) == [("Done", 1)]
    broker.send_work(4, [4])
    wait_until(lambda: model.has("start", 4))
    assert not model.has("end", 2)
    model.let_all_go()
    assert told(broker, 2) == [("Done", 2), ("Done", 4)]


def test_beats_tell_of_the_batch_that_runs(worker: RunningWorker, broker: Broker, model: OverlappingModel) -> None:
    """The broker blames it when the worker dies, and judges how long it runs."""
    send_two(broker, model)
    first = broker.beat_where(lambda beat: beat.batch_id == 1 and beat.busy_ms > 0)
    assert broker.beat_where(lambda beat: beat.busy_ms > first.busy_ms).batch_id == 1
    model.ends[1].set()
    assert told(broker, 1) == [("Done", 1)]
    assert broker.beat_where(lambda beat: beat.busy_ms > 0).batch_id == 2
    model.ends[2].set()
    assert told(broker, 1) == [("Done", 2)]
    assert broker.beat_where(lambda beat: beat.batch_id == 0).busy_ms == 0.0


def test_where_nothing_overlaps_one_thread_does_it_all(broker: Broker, run_dir: RunDir) -> None:
    model = OverlappingModel(overlaps=False)
    worker = RunningWorker(run_dir, model=model)
    worker.loaded.set()
    try:
        while not isinstance(broker.next()[0], m.WorkerHello):
            pass
        broker.say(m.Join(BOOT))
        broker.send_work(1, [1])
        broker.send_work(2, [2])
        wait_until(lambda: model.has("wait", 1))
        broker.send_work(3, [3])
        assert told(broker, 1) == [("BatchFailed", 3)]  # so 2 has arrived
        assert not model.has("start", 2)
        model.let_all_go()
        assert told(broker, 2) == [("Done", 1), ("Done", 2)]
        assert model.happened == [(what, number) for number in (1, 2) for what in ("start", "wait", "end")]
        assert len({thread for _, thread in model.threads}) == 1
    finally:
        model.let_all_go()
        worker.end()


# ---- the end ----


@pytest.mark.parametrize("by_broker", [False, True])
def test_a_drain_answers_both_and_leaves(
    worker: RunningWorker, broker: Broker, model: OverlappingModel, *, by_broker: bool
) -> None:
    send_two(broker, model)
    if by_broker:
        broker.say(m.Drain())
    else:
        worker.signal()
    assert broker.next()[0] == m.Draining([])
    broker.send_work(3, [3])
    assert broker.next()[0] == m.Draining([3])
    model.ends[2].set()
    model.ends[1].set()
    assert told(broker, 2) == [("Done", 1), ("Done", 2)]
    assert broker.next()[0] == m.Bye("")
    assert (worker.exit_status(), worker.exits) == (0, [])
    assert not model.has("start", 3)


def test_a_drain_of_an_idle_worker(worker: RunningWorker, broker: Broker) -> None:
    worker.signal()
    assert broker.next()[0] == m.Draining([])
    assert broker.next()[0] == m.Bye("")
    assert (worker.exit_status(), worker.exits) == (0, [])


def test_a_stuck_batch_holds_up_neither_the_beats_nor_the_end(
    worker: RunningWorker, broker: Broker, model: OverlappingModel
) -> None:
    """The broker sees a batch that runs for ever, and ends the process."""
    send_two(broker, model)
    worker.signal()
    assert broker.next()[0] == m.Draining([])
    first = broker.beat_where(lambda beat: beat.batch_id == 1)
    assert broker.beat_where(lambda beat: beat.busy_ms > first.busy_ms).batch_id == 1
    assert worker.exits == []
    worker.signal()
    assert wait_until(lambda: worker.exits) == [1]
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "finisher")


def test_a_worker_that_is_given_up_ends_at_once_with_two_under_way(
    worker: RunningWorker, broker: Broker, model: OverlappingModel
) -> None:
    send_two(broker, model)
    broker.say(m.Quit("a batch runs for over 30 s (batch_timeout)"))
    wait_until(lambda: worker.exits == [1])


# ---- faults ----


def test_a_device_that_is_lost_while_one_runs_ends_the_worker_once(
    worker: RunningWorker, broker: Broker, model: OverlappingModel, caplog: pytest.LogCaptureFixture
) -> None:
    model.end_failures = {1: LOST, 2: LOST}
    send_two(broker, model)
    with caplog.at_level(logging.CRITICAL):
        model.let_all_go()
        assert worker.exit_status() == 1
    assert rest(broker) == []
    assert [record.getMessage() for record in caplog.records] == [f"the device is lost, ending: {LOST}"]
    assert not model.has("end", 2)


def test_a_device_that_is_lost_as_one_is_begun_lets_the_one_before_have_its_answer(
    worker: RunningWorker, broker: Broker, model: OverlappingModel, caplog: pytest.LogCaptureFixture
) -> None:
    """So the broker blames the right one."""
    model.start_failures = {2: LOST}
    send_two(broker, model)
    with caplog.at_level(logging.CRITICAL):
        model.ends[1].set()
        assert told(broker, 1) == [("Done", 1)]
        assert worker.exit_status() == 1
    assert rest(broker) == []
    assert [record.getMessage() for record in caplog.records] == [f"the device is lost, ending: {LOST}"]


def test_a_device_that_is_lost_as_the_first_is_begun(worker: RunningWorker, broker: Broker, model: OverlappingModel) -> None:
    model.start_failures = {1: LOST}
    broker.send_work(1, [1])
    assert worker.exit_status() == 1
    assert rest(broker) == []


def test_a_device_that_is_lost_to_both_threads(worker: RunningWorker, broker: Broker, model: OverlappingModel) -> None:
    model.start_failures, model.end_failures, model.slow = {2: LOST}, {1: LOST}, {2}
    send_two(broker, model)
    model.begins[2].set()
    model.ends[1].set()
    assert worker.exit_status() == 1
    assert rest(broker) == []


def test_a_start_that_hangs_on_a_lost_device_does_not_hold_the_process(
    worker: RunningWorker, broker: Broker, model: OverlappingModel
) -> None:
    model.end_failures, model.slow = {1: LOST}, {2}
    send_two(broker, model)
    model.ends[1].set()
    wait_until(lambda: worker.exits == [1])
    assert not model.has("wait", 2)


def test_a_fault_at_the_start_fails_its_batch_in_its_turn(
    worker: RunningWorker, broker: Broker, model: OverlappingModel
) -> None:
    model.start_failures = {2: ValueError("the text of an input")}
    send_two(broker, model)
    model.let_all_go()
    assert told(broker, 1) == [("Done", 1)]
    failed, _ = broker.next()
    assert (failed.batch_id, failed.code, failed.retryable) == (2, m.ErrorCode.FORWARD_FAILED, False)
    assert failed.message == "the worker failed: ValueError"
    broker.send_work(3, [3])
    assert told(broker, 1) == [("Done", 3)]


def test_a_fault_at_the_end_fails_its_batch_only(worker: RunningWorker, broker: Broker, model: OverlappingModel) -> None:
    model.end_failures = {1: ValueError("the text of an input")}
    send_two(broker, model)
    model.let_all_go()
    failed, _ = broker.next()
    assert (failed.batch_id, failed.message) == (1, "the worker failed: ValueError")
    assert told(broker, 1) == [("Done", 2)]
    broker.send_work(3, [3])
    assert told(broker, 1) == [("Done", 3)]


def test_results_that_no_answer_can_carry_fail_their_batch_only(
    worker: RunningWorker, broker: Broker, model: OverlappingModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeModel, "start_batch", lambda *_: lambda: None)
    model.let_all_go()
    broker.send_work(1, [1])
    assert told(broker, 1) == [("BatchFailed", 1)]
    monkeypatch.undo()
    broker.send_work(2, [2])
    assert told(broker, 1) == [("Done", 2)]


def test_a_thread_that_answers_no_more_ends_the_worker(
    worker: RunningWorker, broker: Broker, model: OverlappingModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def memory_bytes() -> int | None:
        raise OSError("no such device")

    monkeypatch.setattr(model, "memory_bytes", memory_bytes)
    model.let_all_go()
    broker.send_work(1, [1])
    assert told(broker, 1) == [("Done", 1)]
    assert worker.exit_status() == 1
    assert rest(broker) == []


# ---- a broker that starts again ----


def introduce_again(broker: Broker) -> None:
    broker.say(m.Introduce(BOOT + 1))
    assert isinstance(broker.next()[0], m.WorkerHello)
    broker.say(m.Join(BOOT + 1))


def test_a_new_broker_has_two_credits_while_two_batches_of_the_old_one_run(
    worker: RunningWorker, broker: Broker, model: OverlappingModel
) -> None:
    send_two(broker, model)
    introduce_again(broker)
    for number in (3, 4, 5):
        broker.send_work(number, [number], boot_id=BOOT + 1)
    assert told(broker, 1) == [("BatchFailed", 5)]
    assert not model.has("start", 3), "three would be under way"
    model.ends[1].set()
    wait_until(lambda: model.has("start", 3))
    assert not model.has("start", 4), "three would be under way"
    model.let_all_go()
    answers = [broker.next()[0] for _ in range(4)]
    expected = [(BOOT, 1), (BOOT, 2), (BOOT + 1, 3), (BOOT + 1, 4)]
    assert [(each.boot_id, each.batch_id) for each in answers] == expected


def test_a_drain_behind_two_of_the_old_broker_returns_what_is_not_begun(
    worker: RunningWorker, broker: Broker, model: OverlappingModel
) -> None:
    send_two(broker, model)
    introduce_again(broker)
    broker.send_work(3, [3], boot_id=BOOT + 1)
    broker.say(m.Drain())
    assert broker.next()[0] == m.Draining([3])
    model.let_all_go()
    assert told(broker, 2) == [("Done", 1), ("Done", 2)]
    assert broker.next()[0] == m.Bye("")
    assert worker.exit_status() == 0
    assert not model.has("start", 3)


# ---- times, by a clock of the test ----


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def task(number: int, boot_id: int = BOOT) -> Task:
    return Task(m.Work(boot_id, number, [1]), np.array([number], dtype="<i4").tobytes())


def test_the_time_of_a_batch_behind_another_counts_from_its_turn() -> None:
    clock = Clock()
    desk = Desk(clock)
    desk.put(task(1))
    desk.put(task(2))
    assert [desk.take(2), desk.take(2)] == [task(1), task(2)]
    clock.now += 3.0
    assert desk.running() == (1, 3000.0)
    assert desk.finished() == 3000.0
    assert desk.running() == (2, 0.0)
    clock.now += 1.0
    assert desk.running() == (2, 1000.0)
    assert desk.finished() == 1000.0
    assert desk.running() == (0, 0.0)
    clock.now += 50.0
    desk.put(task(3))
    desk.take(2)
    clock.now += 0.5
    assert desk.running() == (3, 500.0)
    assert desk.finished() == 500.0


def test_what_is_begun_is_neither_dropped_nor_returned() -> None:
    desk = Desk()
    for number in (1, 2):
        desk.put(task(number))
        desk.take(2)
    desk.put(task(3, BOOT + 1))
    assert desk.drop_other_boots(BOOT + 1) == 0
    assert desk.running()[0] == 1
    assert desk.close() == [3]
    assert desk.take(2) is None
    desk.finished()
    assert desk.running()[0] == 2


def new_link(run_dir: RunDir, orders: list[object]) -> Link:
    """The I/O thread's side without that thread: its orders are noted."""
    link = Link(run_dir, WorkerIdentity(3, "cpu", os.getpid(), 99, supervised=True), 0, lambda _status: None, 30.0)
    link.order = orders.append  # type: ignore[method-assign]
    return link


def test_encode_ms_is_the_time_that_a_batch_had_the_device_for_itself(run_dir: RunDir, model: OverlappingModel) -> None:
    orders: list[Any] = []
    link, clock = new_link(run_dir, orders), Clock()
    link.desk = Desk(clock)
    thread = threading.Thread(target=run_overlapped, args=(link, model), daemon=True)
    thread.start()
    for number in (1, 2):
        link.desk.put(task(number))
        wait_until(lambda number=number: model.has("start", number))
        clock.now += 1.0
    clock.now += 8.0
    for number, took_s in ((1, 0.0), (2, 6.0)):
        clock.now += took_s
        model.ends[number].set()
        wait_until(lambda number=number: len(orders) == number)
    clock.now += 20.0  # nothing to do
    link.desk.put(task(3))
    wait_until(lambda: model.has("wait", 3))
    clock.now += 3.0
    model.ends[3].set()
    wait_until(lambda: len(orders) == 3)
    link.desk.close()
    thread.join(10)
    assert not thread.is_alive()
    assert [order.message.encode_ms for order in orders] == [10_000.0, 6_000.0, 3_000.0]


# ---- any timing ----


class HastyModel(FakeModel):
    """Starts and ends after moments of random length; some batches fail, in either place."""

    overlaps = True

    def __init__(self, chance: random.Random, *, loses: int = 0, at_start: bool = False) -> None:
        super().__init__()
        self.chance = chance
        self.loses = loses
        """The batch with which the device is lost; 0 for none."""
        self.at_start = at_start
        self.started: list[int] = []
        self.ended: list[int] = []
        self.most_under_way = 0

    def pause(self) -> None:
        threading.Event().wait(self.chance.choice([0.0, 0.0, 0.0001, 0.001]))

    def start_batch(self, ids: Sequence[NDArray[np.int32]], options: Sequence[m.EncodeOptions]) -> Callable[[], EncodedBatch]:
        number = int(ids[0][0])
        self.started.append(number)
        self.most_under_way = max(self.most_under_way, len(self.started) - len(self.ended))
        self.pause()
        outcome = super().start_batch(ids, options)
        if number == self.loses and self.at_start:
            raise LOST
        if number % 7 == 0:
            self.ended.append(number)
            raise ValueError("a fault at the start")

        def results() -> EncodedBatch:
            self.pause()
            self.ended.append(number)
            if number == self.loses:
                raise LOST
            if number % 5 == 0:
                raise ValueError("a fault at the end")
            return outcome()

        return results


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("loses", "at_start"), [(0, False), (23, False), (23, True)])
@pytest.mark.parametrize("run", [run_overlapped, run_in_turn])
def test_whatever_the_timing_all_is_answered_in_order(
    run_dir: RunDir, seed: int, loses: int, run: Callable[[Link, Any], bool], *, at_start: bool
) -> None:
    chance = random.Random(seed)
    orders: list[Any] = []
    room = threading.Semaphore(2)
    link = new_link(run_dir, orders)

    def order(what: object) -> None:
        orders.append(what)
        room.release()

    link.order = order  # type: ignore[method-assign]
    model = HastyModel(chance, loses=loses, at_start=at_start)
    outcome: list[bool] = []
    thread = threading.Thread(target=lambda: outcome.append(run(link, model)), daemon=True)
    thread.start()
    for number in range(1, 61):
        assert room.acquire(timeout=10)
        if any(isinstance(each, Break) for each in orders):
            break
        assert link.desk.put(task(number)) or loses, "an answer makes room"
    wait_until(lambda: any(isinstance(each, Break) for each in orders) or len(orders) == 60)
    link.desk.close()
    thread.join(10)
    assert not thread.is_alive()
    assert outcome == [not loses]
    answers = [each.message for each in orders if isinstance(each, Answer)]
    last = loses - 1 if loses else 60
    assert [each.batch_id for each in answers] == list(range(1, last + 1))
    assert [isinstance(each, m.Done) for each in answers] == [
        number % 5 > 0 and number % 7 > 0 for number in range(1, last + 1)
    ]
    assert sum(isinstance(each, Break) for each in orders) == bool(loses)
    assert model.started == list(range(1, len(model.started) + 1))
    assert not at_start or model.started[-1] == loses, "something was begun on a lost device"
    assert model.most_under_way <= (2 if run is run_overlapped else 1)
