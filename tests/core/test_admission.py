"""Who is let in: whole or not at all, quickly, with a hint when to come back."""

from __future__ import annotations

import pytest

from broker_story import Story, announce, lost, submit, submit_many, without_logs
from packhorse_broker import admission
from packhorse_broker.admission import WAIT_SHARE
from packhorse_shared.messages import WorkerLimits


def _busy(**values: object) -> Story:
    """A server whose only worker has two batches of one input in flight."""
    story = Story(max_batch_size=1, max_queue_delay=0.0, **values).with_frontend().with_workers("w0")
    story.feed(submit_many([(901, [1]), (902, [1])]))
    return story


def test_the_limit_counts_waiting_inputs_not_running_ones() -> None:
    story = _busy(max_queue_size=2)
    assert story.submit(1) == []
    assert story.submit(2) == ["log: queue is full: new requests get 429", "state -> f0: ready 1 loading 0 queue 2"]
    assert story.submit(3) == ["fail -> f0: 3 queue_full retry 1"]
    assert story.done("w0", 1) == [
        "result -> f0: 901.0",
        "batch 3 -> w0: 1.0",
        "state -> f0: ready 1 loading 0 queue 1",
    ]
    assert story.submit(4)[-1] == "state -> f0: ready 1 loading 0 queue 2"


def test_below_the_limit_a_request_is_admitted_whole_whatever_its_size() -> None:
    story = _busy(max_queue_size=2)
    story.submit(1)
    story.submit(2, [1] * 500)
    assert story.report().queue.inputs == 501
    assert story.report().queue.requests == 2
    assert story.submit(3, [1, 1]) == ["fail -> f0: 3 queue_full retry 1"]
    assert story.report().queue.inputs == 501


def test_resubmitted_requests_pass_the_limit() -> None:
    story = _busy(max_queue_size=1)
    assert without_logs(story.submit(1)) == ["state -> f0: ready 1 loading 0 queue 1"]
    assert without_logs(story.submit(2)) == ["fail -> f0: 2 queue_full retry 1"]
    assert story.submit(2, resubmitted=True) == []


def test_each_request_of_a_message_is_judged_by_itself() -> None:
    story = _busy(max_queue_size=2)
    lines = story.feed(submit_many([(1, [1]), (2, [1]), (3, [1])]))
    assert lines[0] == "fail -> f0: 3 queue_full retry 1"
    assert story.report().queue.inputs == 2


def test_bytes_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packhorse_broker.frontends.MAX_HELD_BYTES", 100)
    story = _busy()
    assert story.submit(1, [30]) == []
    assert story.submit(2, [1]) == ["fail -> f0: 2 queue_full retry 1"]
    story.done("w0", 1)
    story.done("w0", 2)
    story.done("w0", 3)
    assert story.submit(3, [1]) == ["batch 4 -> w0: 3.0"]


def test_a_second_live_copy_is_dropped() -> None:
    story = Story(max_queue_delay=0.0).with_frontend().with_workers("w0")
    assert story.submit(1) == ["batch 1 -> w0: 1.0"]
    assert story.submit(1) == []
    assert story.done("w0", 1) == ["result -> f0: 1.0"]
    assert story.submit(1) == ["batch 2 -> w0: 1.0"]


def test_loading_then_no_worker() -> None:
    story = Story(max_queue_delay=0.0).with_frontend()
    assert story.submit(1) == ["fail -> f0: 1 loading retry 5"]
    story.feed(announce("w0"))
    assert story.submit(2) == ["fail -> f0: 2 loading retry 5"]
    story.with_workers("w0")
    assert story.submit(3) == ["batch 1 -> w0: 3.0"]
    story.done("w0", 1)
    story.feed(lost("w0"))
    assert story.submit(4) == ["fail -> f0: 4 no_worker retry 5"]
    story.feed(announce("w1"))
    assert story.submit(5) == ["fail -> f0: 5 no_worker retry 5"]


def test_accepted_requests_wait_for_the_restart() -> None:
    story = Story(max_queue_delay=0.0).with_frontend().with_workers("w0")
    story.submit(1)
    story.feed(lost("w0"))
    lines = story.with_workers("w1").sent
    assert [batch.worker for batch in lines.values()] == [b"w0", b"w1"]
    assert story.done("w1", 2) == ["result -> f0: 1.0"]


def test_an_input_longer_than_any_workers_budget() -> None:
    story = Story(max_queue_delay=0.0).with_frontend()
    story.with_workers("w0", limits=WorkerLimits(max_batch_size=8, max_num_tokens=10))
    story.with_workers("w1", limits=WorkerLimits(max_batch_size=8, max_num_tokens=20))
    assert story.submit(1, [20, 21, 30]) == ["fail -> f0: 1 input_too_long input 1"]
    assert story.submit(2, [20]) == ["batch 1 -> w1: 2.0"]


def test_the_wait_is_estimated_from_full_batches_and_held_against_the_ttl() -> None:
    story = _busy(max_queue_size=100_000)
    for batch in (1, 2):
        story.now += 0.5
        story.done("w0", batch)
    story.submit(1, [1] * 20)  # one of them leaves, 19 wait; that one, and the request's own batch, are half a second too
    assert story.submit(2, ttl_s=10.4 / WAIT_SHARE) == ["fail -> f0: 2 wait_too_long retry 11"]
    assert story.submit(3, ttl_s=10.6 / WAIT_SHARE) == []
    assert story.submit(4, ttl_s=1.0, priority=-1) == []
    assert story.submit(5, ttl_s=1.0, resubmitted=True) == []


def test_a_large_request_is_waited_for_by_a_turn_only() -> None:
    """The queue is fair: a single beside it is served in its first round."""
    story = _busy(max_queue_size=100_000)
    for batch in (1, 2):
        story.now += 0.5
        story.done("w0", batch)
    story.submit(1, [16] * 1000)
    story.submit(2, [16] * 1000)
    # One turn of each (256 tokens are 16 inputs), about one batch that the worker holds, and its own: half a second each.
    wait_s = 0.5 * (2 * 16 + 1 + 1)
    assert story.submit(3, ttl_s=(wait_s - 1) / WAIT_SHARE)[0].startswith("fail -> f0: 3 wait_too_long")
    assert story.submit(4, ttl_s=(wait_s + 1) / WAIT_SHARE) == []


def test_one_slow_batch_is_not_held_against_singles_for_ever() -> None:
    """The first batch of a cold device, or one that a busy machine held up: while its time makes the broker refuse, no batch
    is ever full again, and a full one would be needed to learn better."""
    story = Story(max_batch_size=8, max_queue_delay=0.0).with_frontend().with_workers("w0")
    story.submit(1, [1] * 8)
    story.now += 4.0
    story.done("w0", 1)
    refused_until = began = story.now
    for rid in range(2, 400, 2):
        story.submit(rid, ttl_s=2.0)
        # The first one runs, the second one is at hand behind it, and each two more wait or are refused.
        if any("wait_too_long" in line for line in story.submit(rid + 1, ttl_s=2.0)):
            refused_until = story.now
        story.now += 0.05
        for batch in [*story.open["w0"]]:
            story.done("w0", batch)
    assert story.now > began + 8
    assert refused_until < began + 6


def test_small_batches_say_nothing_about_a_long_queue() -> None:
    story = Story(max_batch_size=32, max_queue_delay=0.0).with_frontend().with_workers("w0")
    story.submit(1)
    story.now += 0.5
    story.done("w0", 1)
    story.submit(2, [1] * 2000)
    assert story.submit(3, ttl_s=2.0) == []


@pytest.mark.parametrize(("wait_s", "hint_s"), [(None, 1), (0.0, 1), (0.2, 1), (7.1, 8), (500.0, 30)])
def test_the_hint_is_a_whole_number_from_1_to_30(wait_s: float | None, hint_s: int) -> None:
    assert admission.retry_after_s(wait_s) == hint_s


def test_strangers_are_asked_to_introduce_themselves() -> None:
    story = Story().with_workers("w0")
    assert story.feed(submit(1, frontend="f9")) == ["introduce -> f9"]


def test_a_queue_that_touches_its_limit_does_not_flood_frontends_and_log() -> None:
    story = _busy(max_queue_size=8)
    lines = [line for rid in range(8) for line in story.submit(rid)]
    batch = 1
    for rid in range(100, 120):
        lines += story.done("w0", batch)
        lines += story.submit(rid)
        batch += 1
    assert lines.count("log: queue is full: new requests get 429") == 1
    assert [line for line in lines if line.startswith("state")] == ["state -> f0: ready 1 loading 0 queue 8"]
    told: list[str] = []
    while not told:
        told = [line for line in story.done("w0", batch) if line.startswith("state")]
        batch += 1
    assert told == ["state -> f0: ready 1 loading 0 queue 6"]
