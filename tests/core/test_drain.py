"""The broker is told to stop: what was accepted is finished, nothing new is let in."""

from __future__ import annotations

from broker_story import Story, submit
from packhorse_broker import events as e


def test_an_idle_broker_stops_after_a_quiet_moment() -> None:
    story = Story().with_frontend().with_workers("w0")
    assert story.feed(e.DrainBegan()) == [
        "log: draining: new requests are refused",
        "state -> f0: ready 1 loading 0 queue 0 draining",
    ]
    assert story.wait(0.24) == []
    assert story.wait(0.02) == ["drain -> w0", "log: drained", "stop"]


def test_accepted_requests_are_finished_and_new_ones_refused() -> None:
    story = Story(max_queue_delay=0.0, max_batch_size=1).with_frontend().with_workers("w0")
    story.feed(submit(1, [1] * 3))
    story.feed(e.DrainBegan())
    assert story.submit(2) == ["fail -> f0: 2 draining retry 5"]
    assert story.wait_alive(5.0, "w0") == []
    assert story.done("w0", 1) == ["result -> f0: 1.0"]
    assert story.done("w0", 2) == ["result -> f0: 1.1", "batch 3 -> w0: 1.2"]
    assert story.done("w0", 3) == ["result -> f0: 1.2"]
    assert story.wait(0.3) == ["drain -> w0", "log: drained", "stop"]


def test_refused_requests_prolong_the_quiet_but_not_for_long() -> None:
    story = Story().with_frontend().with_workers("w0")
    story.feed(e.DrainBegan())
    waited_s, rid, lines = 0.0, 0, []
    while "stop" not in lines:
        rid += 1
        story.submit(rid)
        lines = story.wait_alive(0.2, "w0")
        waited_s += 0.2
    assert 1.9 < waited_s < 2.5


def test_the_grace_ends_what_does_not_finish() -> None:
    story = Story(max_queue_delay=0.0, shutdown_grace=2.0).with_frontend().with_workers("w0")
    story.submit(1)
    story.feed(e.DrainBegan())
    assert story.wait_alive(1.9, "w0") == []
    lines = story.wait_alive(0.2, "w0")
    assert lines == ["fail -> f0: 1 draining retry 5", "drain -> w0", "log: drained", "stop"]


def test_a_second_drain_event_changes_nothing() -> None:
    story = Story().with_frontend()
    story.feed(e.DrainBegan())
    assert story.feed(e.DrainBegan()) == []
