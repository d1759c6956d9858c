"""The worker's loop against a broker played by the test, with a fake model: no torch, real sockets."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from packhorse_shared import messages as m
from packhorse_shared.codec import MAX_HEADER_BYTES, encode
from packhorse_shared.errors import EXIT_CANNOT_START, CannotStartError
from packhorse_shared.run_dir import RunDir
from packhorse_worker.answers import answer
from packhorse_worker.backend import DeviceLostError, EncodedBatch
from packhorse_worker.brake import Brake
from packhorse_worker.compute import _load_and_compute
from packhorse_worker.desk import Desk, Task
from packhorse_worker.loop import Link
from packhorse_worker.orders import Answer, Finish, WorkerIdentity
from waiting import wait_until
from worker_broker import BOOT, Broker
from worker_thread import FACTS, LIMITS, FakeModel, RunningWorker

WorkerFactory = Callable[..., RunningWorker]


@pytest.fixture
def start_worker(run_dir: RunDir) -> Iterator[WorkerFactory]:
    started: list[RunningWorker] = []

    def start(**options: Any) -> RunningWorker:
        started.append(RunningWorker(run_dir, **options))
        return started[-1]

    yield start
    for each in started:
        each.end()


@pytest.fixture
def broker(run_dir: RunDir) -> Iterator[Broker]:
    found = Broker(run_dir)
    yield found
    found.close()


@pytest.fixture
def worker(start_worker: WorkerFactory, broker: Broker) -> RunningWorker:
    """A worker that has joined."""
    found = start_worker()
    found.loaded.set()
    while not isinstance(broker.next()[0], m.WorkerHello):
        pass
    broker.say(m.Join(BOOT))
    return found


def test_announces_while_loading_then_says_hello(start_worker: WorkerFactory, broker: Broker, run_dir: RunDir) -> None:
    worker = start_worker()
    announce, _ = broker.next()
    assert announce == m.WorkerAnnounce(m.PROTOCOL_VERSION, run_dir.token(), 3, os.getpid(), 99, "cpu")
    beat = broker.beat_where(lambda _: True)
    assert (beat.batch_id, beat.busy_ms) == (0, 0.0)
    assert beat.memory_bytes > 1_000_000
    worker.loaded.set()
    hello, _ = broker.next()
    assert hello == m.WorkerHello(m.PROTOCOL_VERSION, run_dir.token(), 3, os.getpid(), 99, "cpu", FACTS, LIMITS)


def test_waits_for_the_token(start_worker: WorkerFactory, broker: Broker, run_dir: RunDir) -> None:
    token = run_dir.token()
    run_dir.token_file.rename(run_dir.path / "aside")
    start_worker()
    (run_dir.path / "aside").rename(run_dir.token_file)
    assert broker.next()[0].token == token


def test_encodes_batches_in_order(worker: RunningWorker, broker: Broker) -> None:
    broker.send_work(5, [1, 2, 3], [4], options=[m.EncodeOptions(2), m.EncodeOptions()])
    broker.send_work(6, [7])
    first, rows = broker.next()
    assert (first.boot_id, first.batch_id, first.row_values, first.failures) == (BOOT, 5, [2, 2], [])
    assert np.frombuffer(rows, "<f4").tolist() == [6, 2, 4, 0]
    second, rows = broker.next()
    assert second.batch_id == 6
    assert np.frombuffer(rows, "<f4").tolist() == [7, 0]


def test_beats_carry_progress_while_a_batch_is_stuck(worker: RunningWorker, broker: Broker) -> None:
    worker.model.gate.clear()
    broker.send_work(5, [1])
    first = broker.beat_where(lambda beat: beat.batch_id == 5)
    later = broker.beat_where(lambda beat: beat.batch_id == 5 and beat.busy_ms > first.busy_ms)
    assert later.busy_ms >= first.busy_ms + 100
    worker.model.gate.set()
    assert broker.next()[0].batch_id == 5
    assert broker.beat_where(lambda beat: beat.batch_id == 0).busy_ms == 0.0


def test_takes_two_batches_and_no_third(worker: RunningWorker, broker: Broker) -> None:
    worker.model.gate.clear()
    for batch_id in (5, 6, 7):
        broker.send_work(batch_id, [1])
    refused, _ = broker.next()
    assert (refused.batch_id, refused.retryable) == (7, True)
    worker.model.gate.set()
    assert [broker.next()[0].batch_id for _ in range(2)] == [5, 6]


@pytest.mark.parametrize("by_broker", [False, True])
def test_drain_returns_what_is_not_begun_and_finishes_the_rest(
    worker: RunningWorker, broker: Broker, *, by_broker: bool
) -> None:
    worker.model.gate.clear()
    broker.send_work(5, [1])
    wait_until(lambda: worker.model.begun)
    broker.send_work(6, [1])
    # A refusal of the third tells that the second has arrived.
    broker.send_work(7, [1])
    assert broker.next()[0].batch_id == 7
    if by_broker:
        broker.say(m.Drain())
    else:
        worker.signal()
    assert broker.next()[0] == m.Draining([6])
    broker.send_work(8, [1])
    assert broker.next()[0] == m.Draining([8])
    worker.model.gate.set()
    assert broker.next()[0].batch_id == 5
    assert broker.next()[0] == m.Bye("")
    assert worker.exit_status() == 0
    assert worker.model.begun == 1
    assert worker.exits == []


def test_second_signal_ends_at_once_but_drain_and_signal_do_not(worker: RunningWorker, broker: Broker) -> None:
    worker.model.gate.clear()
    broker.send_work(5, [1])
    wait_until(lambda: worker.model.begun)
    broker.say(m.Drain())
    assert broker.next()[0] == m.Draining([])
    worker.signal()
    broker.beat_where(lambda _: True)
    broker.beat_where(lambda _: True)
    assert worker.exits == []
    worker.signal()
    assert wait_until(lambda: worker.exits) == [1]


def test_signal_while_loading_leaves_at_once(start_worker: WorkerFactory, broker: Broker) -> None:
    worker = start_worker()
    assert isinstance(broker.next()[0], m.WorkerAnnounce)
    worker.signal()
    assert broker.next()[0] == m.Bye("")
    assert wait_until(lambda: worker.exits) == [0]


def test_a_model_that_cannot_be_loaded_says_why(start_worker: WorkerFactory, broker: Broker) -> None:
    worker = start_worker()
    worker.load_error = CannotStartError("config.json is missing")
    worker.loaded.set()
    assert isinstance(broker.next()[0], m.WorkerAnnounce)
    assert broker.next()[0] == m.Bye("config.json is missing")
    assert worker.exit_status() == 3


def test_an_unforeseen_load_failure_may_be_tried_again(start_worker: WorkerFactory) -> None:
    worker = start_worker()
    worker.load_error = RuntimeError("no luck")
    worker.loaded.set()
    assert worker.exit_status() == 1


def test_introduces_itself_again_to_a_new_broker(worker: RunningWorker, broker: Broker) -> None:
    """What the old broker sent and is not begun is dropped; what runs is still answered."""
    worker.model.gate.clear()
    broker.send_work(5, [1])
    wait_until(lambda: worker.model.begun)
    broker.send_work(6, [1])
    broker.say(m.Introduce(BOOT + 1))
    assert isinstance(broker.next()[0], m.WorkerHello)
    broker.say(m.Join(BOOT + 1))
    broker.send_work(7, [9], boot_id=BOOT + 1)
    worker.model.gate.set()
    answers = [broker.next()[0] for _ in range(2)]
    assert [(each.boot_id, each.batch_id) for each in answers] == [(BOOT, 5), (BOOT + 1, 7)]


def test_survives_a_broker_restart(worker: RunningWorker, broker: Broker, run_dir: RunDir) -> None:
    """The worker comes to the new broker by itself and does not flood it with the beats of the time between."""
    broker.close()
    run_dir.clear_endpoints()
    second = Broker(run_dir)
    try:
        assert isinstance(second.next(beats=True)[0], m.Beat)
        second.say(m.Introduce(BOOT + 1))
        assert isinstance(second.next()[0], m.WorkerHello)
        second.say(m.Join(BOOT + 1))
        second.send_work(9, [4], boot_id=BOOT + 1)
        assert second.next()[0].batch_id == 9
    finally:
        second.close()


def test_refused_worker_stops(worker: RunningWorker, broker: Broker) -> None:
    broker.say(m.Refused("another model is served"))
    assert worker.exit_status() == 3


def test_one_that_the_broker_gave_up_ends_at_once_whatever_it_runs(worker: RunningWorker, broker: Broker) -> None:
    """On another machine nobody else would end it."""
    worker.model.gate.clear()
    broker.send_work(5, [1])
    wait_until(lambda: worker.model.begun)
    broker.say(m.Quit("a batch runs for over 30 s (batch_timeout)"))
    wait_until(lambda: worker.exits == [1])


def test_refused_worker_stops_whatever_it_runs(worker: RunningWorker, broker: Broker) -> None:
    worker.model.gate.clear()
    broker.send_work(5, [1])
    wait_until(lambda: worker.model.begun)
    broker.say(m.Refused("its key was taken away"))
    wait_until(lambda: worker.exits == [EXIT_CANNOT_START])


def test_worker_by_hand_gives_up_without_a_broker(start_worker: WorkerFactory) -> None:
    worker = start_worker(supervised=False, give_up_after_s=0.2)
    worker.loaded.set()
    assert worker.exit_status() == 3


def test_malformed_messages_are_dropped(worker: RunningWorker, broker: Broker) -> None:
    broker.say_raw(b"\x33", b"junk", b"")
    broker.say_raw(b"\x33")
    broker.say_raw(*encode(m.Bye("")))
    broker.send_work(5, [1], [2], options=[m.EncodeOptions()])
    failed, _ = broker.next()
    assert (failed.batch_id, failed.retryable) == (5, False)
    broker.send_work(6, [3])
    assert broker.next()[0].batch_id == 6


def test_a_fault_of_the_model_object_fails_the_batch_only(worker: RunningWorker, broker: Broker) -> None:
    worker.model.failure = ValueError("the text of an input")
    broker.send_work(5, [1])
    failed, _ = broker.next()
    assert (failed.batch_id, failed.code, failed.retryable) == (5, m.ErrorCode.FORWARD_FAILED, False)
    assert "the text" not in failed.message
    worker.model.failure = None
    broker.send_work(6, [1])
    assert broker.next()[0].batch_id == 6


def test_a_lost_device_ends_the_process_without_an_answer(worker: RunningWorker, broker: Broker) -> None:
    """The broker must see a death: only so does it find the input that causes it."""
    worker.model.failure = DeviceLostError("CUDA error: device-side assert triggered")
    broker.send_work(5, [1])
    assert worker.exit_status() == 1
    assert not broker._socket.poll(0) or isinstance(broker.next(beats=True)[0], m.Beat)


def test_desk_forgets_what_it_returned() -> None:
    desk = Desk()
    task = Task(m.Work(BOOT, 5, [1]), b"\0\0\0\0")
    assert desk.put(task)
    assert desk.close() == [5]
    assert not desk.put(task)
    assert desk.take() is None


def _task(batch_id: int, boot_id: int = BOOT) -> Task:
    return Task(m.Work(boot_id, batch_id, [2]), b"\0" * 8)


def test_room_is_made_before_the_answer_is_sent(monkeypatch: pytest.MonkeyPatch, run_dir: RunDir) -> None:
    """The broker sends the next batch the moment it hears the answer; the desk must not still count the old one."""
    link = Link(run_dir, WorkerIdentity(3, "cpu", os.getpid(), 99, supervised=True), 0, lambda _status: None, 30.0)
    accepted: list[bool] = []

    def order(what: object) -> None:
        if isinstance(what, Answer):
            accepted.append(link.desk.put(_task(7)))
            link.desk.close()

    monkeypatch.setattr(link, "order", order)
    assert link.desk.put(_task(1))
    assert link.desk.put(_task(2))
    _load_and_compute(link, FakeModel)
    assert accepted[0], "two credits: one batch was answered, one is at hand, so one more fits"


@pytest.mark.parametrize(
    ("prompts", "reason"),
    [
        ({str(number): "x" * 8000 for number in range(8)}, "prompts take"),
        ({"query": "x" * 9000}, "length <= 8192"),
    ],
)
def test_facts_that_no_hello_can_carry_stop_the_start(
    monkeypatch: pytest.MonkeyPatch, run_dir: RunDir, prompts: dict[str, str], reason: str
) -> None:
    """The broker would drop the hello, and the worker would load for ever."""
    model = FakeModel()
    model.facts = msgspec.structs.replace(model.facts, prompts=prompts)
    assert reason in reason_not_to_start(monkeypatch, run_dir, model)


@pytest.mark.parametrize(
    ("facts", "limits", "setting"),
    [
        ({"task": "token_reward", "dimension": 40_000}, (32, 8192), "max_num_tokens: .* 8192 tokens .* at most 6710$"),
        ({"task": "classify", "dimension": 1 << 20}, (512, 8192), "max_batch_size: .* 512 inputs .* at most 256$"),
    ],
)
def test_batches_whose_answer_no_message_can_carry_stop_the_start(
    monkeypatch: pytest.MonkeyPatch, run_dir: RunDir, facts: dict[str, Any], limits: tuple[int, int], setting: str
) -> None:
    """The broker's socket would drop the connection, again and again, and the batch would never be answered."""
    model = FakeModel()
    model.facts = msgspec.structs.replace(model.facts, **facts)
    model.limits = m.WorkerLimits(*limits)
    assert re.match(setting, reason_not_to_start(monkeypatch, run_dir, model))


def reason_not_to_start(monkeypatch: pytest.MonkeyPatch, run_dir: RunDir, model: FakeModel) -> str:
    """The one thing that a worker with this model says to the broker."""
    link = Link(run_dir, WorkerIdentity(3, "cpu", os.getpid(), 99, supervised=True), 0, lambda _status: None, 30.0)
    orders: list[object] = []
    monkeypatch.setattr(link, "order", orders.append)
    assert _load_and_compute(link, lambda: model) == EXIT_CANNOT_START
    (order,) = orders
    assert isinstance(order, Finish)
    return order.reason


def test_desk_shows_work_as_long_as_there_is_some() -> None:
    """A worker that comes back from a silence is sent two batches when it shows none: so none may be at hand then."""
    desk = Desk()
    assert desk.running()[0] == 0
    assert desk.put(_task(1))
    assert desk.put(_task(2))
    desk.take()
    desk.finished()
    assert desk.running()[0] == 2


def test_desk_does_not_count_batches_of_a_broker_that_is_gone() -> None:
    desk = Desk()
    assert desk.put(_task(1))
    desk.take()
    desk.drop_other_boots(BOOT + 1)
    assert [desk.put(_task(batch_id, BOOT + 1)) for batch_id in (1, 2, 3)] == [True, True, False]


def _outcome(inputs: int, message: str) -> tuple[Task, EncodedBatch]:
    failures = [m.InputFailure(index, m.ErrorCode.NON_FINITE_OUTPUT, message) for index in range(inputs)]
    task = Task(m.Work(BOOT, 5, [1] * inputs), b"\0\0\0\0" * inputs)
    return task, EncodedBatch(np.empty(0, dtype=np.float32), [0] * inputs, failures)


@pytest.mark.parametrize(("inputs", "kind"), [(1, m.Done), (1500, m.Done), (4096, m.BatchFailed)])
def test_headers_stay_within_their_limit(inputs: int, kind: type) -> None:
    message, payload = answer(*_outcome(inputs, "é" * 256), encode_ms=1.0)
    assert isinstance(message, kind)
    assert len(msgspec.msgpack.encode(message)) <= MAX_HEADER_BYTES
    assert encode(message, payload)
    if isinstance(message, m.Done):
        assert len(message.failures) == inputs
        assert message.failures[0].message == "é" * 256


def test_brake_waits_longer_after_each_early_death(tmp_path: Path) -> None:
    brake = Brake(tmp_path / "starts")
    assert [brake.begin(1000.0 + second) for second in range(8)] == [0, 0, 0, 1, 2, 4, 8, 10]
    assert brake.begin(1100.0) == 0


def test_brake_forgets_after_a_good_end(tmp_path: Path) -> None:
    brake = Brake(tmp_path / "starts")
    for second in range(5):
        brake.begin(1000.0 + second)
    brake.end()
    assert brake.begin(1005.0) == 0


@pytest.mark.parametrize("content", ["", "{}", '["x"]', "[99999]"])
def test_brake_ignores_a_broken_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "starts").write_text(content)
    assert Brake(tmp_path / "starts").begin(1000.0) == 0


def test_a_full_disk_costs_a_pause_and_not_the_worker(tmp_path: Path) -> None:
    brake = Brake(tmp_path / "missing" / "starts")
    assert brake.begin(1000.0) == 1
    brake.end()
