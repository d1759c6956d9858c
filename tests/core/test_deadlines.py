"""A request's time runs out, its client leaves, its frontend dies."""

from __future__ import annotations

from broker_story import Story, submit
from packhorse_broker import events as e
from packhorse_broker.frontends import FRONTEND_SILENT_S


def test_on_expiry_queued_inputs_are_dropped_and_late_rows_ignored() -> None:
    story = Story(max_batch_size=1, max_queue_delay=0.0).with_frontend().with_workers("w0")
    story.submit(1, [1] * 4, ttl_s=0.5)
    assert story.report().queue.inputs == 2
    assert story.wait(0.499) == []
    assert story.wait(0.002) == ["fail -> f0: 1 timeout"]
    assert story.report().queue.inputs == 0
    assert story.done("w0", 1) == []
    assert story.done("w0", 2) == []


def test_no_time_left_on_arrival() -> None:
    story = Story().with_frontend().with_workers("w0")
    assert story.submit(1, ttl_s=0.0) == ["fail -> f0: 1 timeout"]


def test_a_request_in_time_is_not_failed_later() -> None:
    story = Story(max_queue_delay=0.0).with_frontend().with_workers("w0")
    story.submit(1, ttl_s=0.5)
    story.done("w0", 1)
    assert story.wait_alive(2.0, "w0") == []


def test_cancel_drops_queued_inputs_and_says_nothing() -> None:
    story = Story(max_batch_size=1, max_queue_delay=0.0).with_frontend().with_workers("w0")
    story.submit(1, [1] * 5)
    assert story.feed(e.RequestsCancelled(b"f0", [1, 99])) == []
    assert story.report().queue.inputs == 0
    assert story.done("w0", 1) == []
    assert story.submit(2) == ["batch 3 -> w0: 2.0"]


def test_cancel_of_one_leaves_the_others_of_its_batch() -> None:
    story = Story(max_queue_delay=0.0).with_frontend().with_workers("w0")
    story.feed(submit(1), submit(2))
    story.feed(e.RequestsCancelled(b"f0", [1]))
    assert story.done("w0", 1) == ["result -> f0: 2.0"]


def test_a_lost_frontends_requests_are_dropped_and_no_others() -> None:
    story = Story(max_batch_size=1, max_queue_delay=0.0).with_frontend("f0").with_frontend("f1").with_workers("w0")
    story.feed(submit(1, [1] * 3), submit(1, [1] * 2, frontend="f1"))
    assert story.feed(e.FrontendLost(b"f0", "its process ended")) == ["unwatch f0", "log: frontend left: its process ended"]
    lines = [line for batch in (1, 2, 3, 4) if batch in story.sent for line in story.done("w0", batch)]
    assert [line for line in lines if line.startswith("result")] == ["result -> f1: 1.0", "result -> f1: 1.1"]
    assert story.report().queue.inputs == 0


def test_a_silent_frontend_is_given_up() -> None:
    story = Story(max_queue_delay=0.0).with_frontend("f0").with_frontend("f1")
    story.submit(1, resubmitted=True)
    story.wait(FRONTEND_SILENT_S - 1)
    assert story.feed(e.FrontendPinged(b"f1")) == ["state -> f1: ready 0 loading 0 queue 1"]
    assert story.wait(1.5) == ["unwatch f0", f"log: frontend left: silent for {FRONTEND_SILENT_S:g} s"]
    assert story.report().queue.inputs == 0


def test_memory_follows_the_live_requests() -> None:
    story = Story(max_queue_delay=0.0).with_frontend().with_workers("w0")
    for rid in range(1, 2000):
        story.submit(rid, ttl_s=3600.0)
        story.done("w0", rid)
    heap = story.core._ledger._deadlines._heap
    assert len(heap) < 100
