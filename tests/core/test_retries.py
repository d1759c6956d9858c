"""Workers die: nothing is lost, the guilty input is found, nobody else pays."""

from __future__ import annotations

import math

import pytest

from broker_story import BOOT_ID, Story, beat, hello, inputs_of, lost, submit, without_logs
from packhorse_broker import events as e
from packhorse_broker.retries import SPARED_S
from packhorse_shared.messages import BatchFailed, ErrorCode, InputFailure


def test_the_running_batch_is_retried_elsewhere_and_the_one_at_hand_goes_back_to_the_front() -> None:
    story = Story(max_batch_size=2, max_queue_delay=0.0).with_frontend().with_workers("w0")
    story.feed(submit(1, [1] * 6))
    story.with_workers("w1")
    assert [batch.worker for batch in story.sent.values()] == [b"w0", b"w0", b"w1"]
    lines = without_logs(story.feed(lost("w0")))
    assert lines == ["state -> f0: ready 1 loading 0 queue 4"]
    # 1.0 and 1.1 died once: they go alone (sqrt(2) rounded up is 2) and first; 1.2 and 1.3 were never begun.
    assert story.done("w1", 3) == ["result -> f0: 1.4 1.5", "batch 4 -> w1: 1.0 1.1"]
    assert story.done("w1", 4) == ["result -> f0: 1.0 1.1", "batch 5 -> w1: 1.2 1.3"]
    assert story.done("w1", 5) == ["result -> f0: 1.2 1.3"]


@pytest.mark.parametrize("size", [1, 2, 9, 32, 100])
def test_a_poison_input_is_found_in_exactly_3_deaths_and_everyone_else_is_served(size: int) -> None:
    story = Story(max_batch_size=size, max_queue_delay=0.0).with_frontend().with_workers("w0", "w1")
    poison = size // 2
    lines = story.feed(*(submit(rid) for rid in range(size)))
    deaths, workers, answered = 0, 2, []
    while open_batches := [batch for batch in story.sent if batch not in answered]:
        batch = open_batches[0]
        answered.append(batch)
        worker = story.sent[batch].worker.decode()
        if (poison, 0) in inputs_of(story.sent[batch]):
            deaths += 1
            lines += story.feed(lost(worker))
            story.with_workers(f"w{workers}")
            workers += 1
        else:
            lines += story.done(worker, batch)
    results = [word for line in lines if line.startswith("result") for word in line.split()[3:]]
    assert deaths == 3
    assert sorted(results) == sorted(f"{rid}.0" for rid in range(size) if rid != poison)
    assert [line for line in lines if line.startswith("fail")] == [f"fail -> f0: {poison} worker_died input 0"]
    assert max(len(inputs_of(story.sent[batch])) for batch in answered[1:] or [1]) <= math.ceil(math.sqrt(size))


def test_suspects_run_one_group_at_a_time_and_the_others_keep_serving() -> None:
    story = Story(max_batch_size=4, max_queue_delay=0.0).with_frontend().with_workers("w0", "w1", "w2")
    story.feed(submit(1, [1] * 4))
    assert without_logs(story.feed(lost("w0")))[0] == "batch 2 -> w1: 1.0 1.1"
    assert story.feed(submit(2, [1] * 4)) == ["batch 3 -> w2: 2.0 2.1 2.2 2.3"]
    assert story.feed(submit(3, [1] * 4)) == ["batch 4 -> w2: 3.0 3.1 3.2 3.3"]
    assert story.done("w1", 2) == ["result -> f0: 1.0 1.1", "batch 5 -> w1: 1.2 1.3"]


def test_waiting_suspects_get_a_worker_although_the_queue_is_full_of_work() -> None:
    story = Story(max_batch_size=2, max_queue_delay=0.0).with_frontend().with_workers("w0", "w1")
    story.feed(submit(1, [1] * 40))
    story.feed(lost("w0"))
    mine = [batch for batch, sent in story.sent.items() if sent.worker == b"w1"]
    assert len(mine) == 2
    assert story.done("w1", mine[0]) == ["result -> f0: 1.2 1.3"]
    assert len(story.sent) == 4
    lines = story.done("w1", mine[1])
    assert lines[1] == "batch 5 -> w1: 1.0 1.1"


def test_a_death_of_one_request_leaves_no_trace_in_the_others() -> None:
    story = Story(max_queue_delay=0.0, max_batch_size=1).with_frontend().with_workers("w0")
    story.submit(1)
    for _ in range(2):
        story.feed(lost("w0"))
        story.with_workers("w0")
    lines = without_logs(story.feed(lost("w0")))
    assert lines == ["fail -> f0: 1 worker_died input 0", "state -> f0: ready 0 loading 0 queue 0"]


def test_an_unreachable_worker_is_lost_once() -> None:
    story = Story(max_queue_delay=0.0).with_frontend().with_workers("w0", "w1")
    story.submit(1)
    assert "batch 2 -> w1: 1.0" in story.feed(e.WorkerLost(b"w0", "unreachable"))
    assert story.feed(lost("w0")) == []


def test_an_answer_of_a_dead_attempt_is_ignored() -> None:
    story = Story(max_queue_delay=0.0).with_frontend().with_workers("w0", "w1")
    story.submit(1)
    late = story.done_event("w0", 1)
    story.feed(lost("w0"))
    assert story.feed(late) == ["introduce -> w0"]
    assert story.feed(e.BatchFinished(b"w1", late.done, late.payload)) == []
    assert story.done("w1", 2) == ["result -> f0: 1.0"]


def test_an_answer_from_another_boot_is_ignored() -> None:
    story = Story(max_queue_delay=0.0).with_frontend().with_workers("w0")
    story.submit(1)
    assert story.feed(story.done_event("w0", 1, boot_id=1)) == []
    assert story.done("w0", 1) == ["result -> f0: 1.0"]


def test_of_two_workers_the_second_one_takes_a_first_retry_at_once() -> None:
    """Most deaths are no input's fault."""
    story = Story(max_queue_delay=0.0).with_frontend().with_workers("w0", "w1")
    story.submit(1)
    assert "batch 2 -> w1: 1.0" in story.feed(lost("w0"))


def test_the_last_of_three_is_not_given_what_others_died_of_while_they_come_back() -> None:
    story = Story(max_queue_delay=0.0).with_frontend().with_workers("w0", "w1", "w2")
    assert [story.submit(1), story.submit(2)] == [["batch 1 -> w0: 1.0"], ["batch 2 -> w1: 2.0"]]
    assert "batch 3 -> w2: 1.0" in story.feed(lost("w0"))  # w1 still lives
    story.feed(lost("w1"))
    assert story.done("w2", 3) == ["result -> f0: 1.0"]
    assert story.wait_alive(SPARED_S - 0.1, "w2") == []
    assert story.wait_alive(0.2, "w2") == ["batch 4 -> w2: 2.0"]


def test_what_two_workers_died_of_is_not_given_to_the_last_one_while_another_comes_back() -> None:
    story = Story(max_queue_delay=0.0).with_frontend().with_workers("w0", "w1", "w2")
    assert story.submit(1) == ["batch 1 -> w0: 1.0"]
    assert "batch 2 -> w1: 1.0" in story.feed(lost("w0"))
    assert not [line for line in story.feed(lost("w1")) if line.startswith("batch")]
    assert story.submit(2) == ["batch 3 -> w2: 2.0"]
    assert story.done("w2", 3) == ["result -> f0: 2.0"]
    story.with_workers("w3")
    assert story.sent[4].worker == b"w2"
    assert "fail -> f0: 1 worker_died input 0" in story.feed(lost("w2"))


def test_the_last_worker_is_spared_for_a_while_only() -> None:
    story = Story(max_queue_delay=0.0).with_frontend().with_workers("w0", "w1", "w2")
    story.submit(1)
    story.feed(lost("w0"))
    story.feed(lost("w1"))
    assert story.wait_alive(SPARED_S - 0.1, "w2") == []
    assert story.submit(2, [1, 1]) == ["batch 3 -> w2: 2.0 2.1"]
    assert story.done("w2", 3) == ["result -> f0: 2.0 2.1"]
    assert story.wait_alive(0.2, "w2") == ["batch 4 -> w2: 1.0"]


def test_a_server_of_one_worker_has_nobody_to_wait_for() -> None:
    story = Story(max_queue_delay=0.0).with_frontend().with_workers("w0")
    story.submit(1)
    for _ in range(2):
        story.feed(lost("w0"))
        story.with_workers("w0")
    assert len(story.sent) == 3


def test_a_failed_input_fails_its_request_only() -> None:
    story = Story(max_queue_delay=0.0, max_batch_size=8).with_frontend().with_workers("w0")
    story.feed(submit(1, [1, 1]), submit(2, [1, 1]))
    lines = story.done("w0", 1, failures=[InputFailure(1, ErrorCode.NON_FINITE_OUTPUT, "")])
    assert lines == ["fail -> f0: 1 non_finite_output input 1", "result -> f0: 2.0 2.1"]


def test_the_rest_of_a_failed_request_is_dropped() -> None:
    story = Story(max_queue_delay=0.0, max_batch_size=1).with_frontend().with_workers("w0")
    story.feed(submit(1, [1] * 5))
    lines = story.done("w0", 1, failures=[InputFailure(0, ErrorCode.FORWARD_FAILED, "boom")])
    assert lines == ["fail -> f0: 1 forward_failed input 0"]
    assert story.report().queue.inputs == 0


def test_a_wrong_number_of_rows_is_a_failed_attempt() -> None:
    story = Story(max_queue_delay=0.0).with_frontend().with_workers("w0")
    story.feed(submit(1, [1, 1]))
    good = story.done_event("w0", 1)
    bad = e.BatchFinished(b"w0", type(good.done)(77, 1, [2], [], 1.0), good.payload[:8])
    assert without_logs(story.feed(bad)) == ["batch 2 -> w0: 1.0 1.1"]


def test_a_retryable_failure_is_retried_and_counted() -> None:
    story = Story(max_queue_delay=0.0).with_frontend().with_workers("w0")
    story.submit(1)
    lines = []
    for batch in (1, 2, 3):
        failed = BatchFailed(77, batch, ErrorCode.OUT_OF_MEMORY, "no memory", retryable=True)
        lines += without_logs(story.feed(e.BatchBroke(b"w0", failed)))
    assert lines == ["batch 2 -> w0: 1.0", "batch 3 -> w0: 1.0", "fail -> f0: 1 out_of_memory input 0"]


def test_a_final_failure_fails_the_requests_of_the_batch() -> None:
    story = Story(max_queue_delay=0.0).with_frontend().with_workers("w0")
    story.feed(submit(1, [1, 1]), submit(2))
    failed = BatchFailed(77, 1, ErrorCode.FORWARD_FAILED, "broken", retryable=False)
    lines = without_logs(story.feed(e.BatchBroke(b"w0", failed)))
    assert lines == ["fail -> f0: 1 forward_failed", "fail -> f0: 2 forward_failed"]


def test_a_draining_worker_hands_back_and_nothing_is_charged() -> None:
    story = Story(max_batch_size=1, max_queue_delay=0.0).with_frontend().with_workers("w0")
    story.feed(submit(1, [1, 1, 1]))
    lines = story.feed(e.WorkerDrained(b"w0", [2]))
    assert lines == ["log: worker drains", "state -> f0: ready 0 loading 0 queue 2"]
    assert story.report().workers[0].state == "draining"
    assert story.done("w0", 1) == ["result -> f0: 1.0"]
    assert story.feed(e.WorkerLeft(b"w0", "")) == ["log: worker left"]
    story.feed(hello("w1"))
    assert "batch 3 -> w1: 1.1" in story.passed("w1")


def test_work_that_reached_a_draining_worker_too_late_goes_back_at_its_bye() -> None:
    story = Story(max_queue_delay=0.0).with_frontend().with_workers("w0", "w1")
    story.feed(submit(1, [1] * 9))
    story.feed(e.WorkerDrained(b"w0", []))
    lines = story.feed(e.WorkerLeft(b"w0", ""))
    # As one batch of nine: suspects would come in threes.
    assert lines == ["batch 2 -> w1: " + " ".join(f"1.{index}" for index in range(9)), "log: worker left"][::-1]


def test_a_death_after_the_client_left_fails_nobody() -> None:
    story = Story(max_queue_delay=0.0).with_frontend().with_workers("w0")
    story.submit(1)
    story.feed(lost("w0"))
    story.with_workers("w1").feed(lost("w1"))
    story.with_workers("w2")
    story.feed(e.RequestsCancelled(b"f0", [1]))
    assert without_logs(story.feed(lost("w2"))) == ["state -> f0: ready 0 loading 0 queue 0"]


def test_a_worker_that_refuses_a_batch_is_left_alone_until_it_beats_free_and_nothing_is_charged() -> None:
    story = Story(max_queue_delay=0.0).with_frontend().with_workers("w0")
    story.submit(1)
    for batch in range(1, 6):
        refusal = BatchFailed(BOOT_ID, batch, ErrorCode.NO_WORKER, "busy", retryable=True)
        assert without_logs(story.feed(e.BatchBroke(b"w0", refusal)))[:1] == ["state -> f0: ready 0 loading 0 queue 1"]
        assert without_logs(story.feed(beat("w0", batch_id=99))) == []
        assert without_logs(story.feed(beat("w0")))[0] == f"batch {batch + 1} -> w0: 1.0"
    assert story.done("w0", 6) == ["result -> f0: 1.0"]


def test_a_refused_batch_goes_to_another_worker_at_once() -> None:
    story = Story(max_queue_delay=0.0).with_frontend().with_workers("w0", "w1")
    story.submit(1)
    refusal = BatchFailed(BOOT_ID, 1, ErrorCode.NO_WORKER, "busy", retryable=True)
    assert without_logs(story.feed(e.BatchBroke(b"w0", refusal)))[0] == "batch 2 -> w1: 1.0"
