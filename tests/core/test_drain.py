"""The broker is told to stop: what was accepted is finished, nothing new is let in."""

from __future__ import annotations

import pytest

from broker_story import Story, announce, beat, lost, submit
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


def drained_and_left(story: Story, *workers: str) -> list[str]:
    """Workers that are stopped: each hands back what it has, and leaves."""
    lines = []
    for worker in workers:
        lines += story.feed(e.WorkerDrained(worker.encode(), story.open.pop(worker, [])))
        lines += story.feed(e.WorkerLeft(worker.encode(), ""))
    return lines


def test_what_waits_is_refused_soon_when_all_workers_are_stopped_as_well() -> None:
    """``supervisorctl stop all`` signals all processes at once: nobody will ever run what the broker holds."""
    story = Story(max_queue_delay=0.0, shutdown_grace=30.0).with_frontend().with_workers("w0", "w1")
    story.feed(submit(1), submit(2))
    story.feed(e.DrainBegan())
    assert not [line for line in drained_and_left(story, "w0", "w1") if line.startswith("fail")]
    assert story.wait(1.9) == []
    assert story.wait(0.2) == [
        "log: draining: all workers have left, what waits is refused",
        "fail -> f0: 1 draining retry 5",
        "fail -> f0: 2 draining retry 5",
    ]
    assert story.submit(3, resubmitted=True)[1:] == ["fail -> f0: 3 draining retry 5"]
    assert story.wait(0.3) == ["log: drained", "stop"]


def test_what_waits_is_kept_while_one_worker_still_finishes_its_batch() -> None:
    story = Story(max_queue_delay=0.0, shutdown_grace=30.0).with_frontend().with_workers("w0", "w1")
    story.feed(submit(1))
    story.feed(submit(2))
    story.feed(submit(3))
    story.feed(e.DrainBegan())
    drained_and_left(story, "w0")
    (running, *_) = story.open["w1"]
    story.feed(e.WorkerDrained(b"w1", []))
    for _ in range(20):
        assert not [line for line in story.wait(0.25) + story.feed(beat("w1", running)) if line.startswith("fail")]
    assert any(line.startswith("result") for line in story.done("w1", running))


@pytest.mark.parametrize("comes_back", ["a stopped one", "a dead one", "one that failed"])
def test_a_worker_that_comes_back_during_a_drain_runs_what_waits(comes_back: str) -> None:
    """The broker alone is drained; its worker goes meanwhile and is started again, as supervisord does."""
    story = Story(max_queue_delay=0.0, shutdown_grace=30.0).with_frontend().with_workers("w0")
    story.feed(submit(1))
    story.feed(e.DrainBegan())
    if comes_back == "a stopped one":
        drained_and_left(story, "w0")
        story.wait(1.5)
    else:
        story.feed(lost("w0") if comes_back == "a dead one" else e.WorkerLeft(b"w0", "a CUDA error"))
        assert story.wait(15.0) == []
    story.feed(announce("w0", incarnation=2))
    story.wait(10.0)
    story.with_workers("w0")
    assert story.done("w0", max(story.sent)) == ["result -> f0: 1.0"]


def test_a_worker_that_dies_while_it_drains_is_not_waited_for() -> None:
    story = Story(max_queue_delay=0.0, shutdown_grace=30.0).with_frontend().with_workers("w0")
    story.feed(submit(1))
    story.feed(e.DrainBegan())
    story.feed(e.WorkerDrained(b"w0", []))
    story.feed(lost("w0"))
    assert "fail -> f0: 1 draining retry 5" in story.wait(2.1)


def test_a_drain_of_a_broker_that_knows_no_worker_yet_gives_them_time_to_introduce_themselves() -> None:
    story = Story(max_queue_delay=0.0, shutdown_grace=30.0).with_frontend()
    story.submit(1, resubmitted=True)
    story.wait(20.0)
    story.feed(e.DrainBegan())
    story.wait(1.0)
    story.with_workers("w0")
    assert story.done("w0", max(story.sent)) == ["result -> f0: 1.0"]


def test_a_dead_worker_that_stays_away_is_waited_for_no_longer_than_it_is_remembered() -> None:
    story = Story(max_queue_delay=0.0, shutdown_grace=600.0).with_frontend().with_workers("w0")
    story.submit(1, ttl_s=500.0)
    story.feed(e.DrainBegan())
    story.feed(lost("w0"))
    failed_after_s = None
    for second in range(100):
        story.feed(e.FrontendPinged(b"f0"))
        if "fail -> f0: 1 draining retry 5" in story.wait(1.0):
            failed_after_s = second
            break
    assert failed_after_s in (59, 60, 61)
