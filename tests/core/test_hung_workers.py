"""Workers that stop answering: their work is moved, they are killed in time, late answers fall flat."""

from __future__ import annotations

import pytest

from broker_story import ROOMY, Story, announce, beat, hello, inputs_of, submit, without_logs
from packhorse_broker import events as e
from packhorse_broker.leases import HELD_UP_S
from packhorse_broker.retries import SPARED_S
from packhorse_shared.messages import WorkerLimits


def test_silent_for_a_second_its_work_is_moved() -> None:
    story = Story(max_queue_delay=0.0).with_frontend().with_workers("w0", "w1")
    story.submit(1)
    late = story.done_event("w0", 1)
    assert story.wait_alive(0.75, "w1") == []
    lines = without_logs(story.wait_alive(0.5, "w1"))
    assert lines == ["batch 2 -> w1: 1.0", "state -> f0: ready 1 loading 0 queue 0"]
    assert story.report().workers[0].state == "gone"
    assert story.feed(late) == []
    assert story.done("w1", 2) == ["result -> f0: 1.0"]


def test_when_it_beats_again_it_is_ready_again() -> None:
    story = Story(max_queue_delay=0.0).with_frontend().with_workers("w0")
    story.submit(1)
    assert without_logs(story.wait(1.0)) == ["state -> f0: ready 0 loading 0 queue 1"]
    assert story.feed(beat("w0", batch_id=1, busy_ms=1000)) == []  # it still runs what was moved
    lines = without_logs(story.back("w0"))
    assert lines == [
        "canary -> w0",
        "state -> f0: ready 0 loading 1 queue 1",
        "join -> w0",
        "batch 2 -> w0: 1.0",
        "state -> f0: ready 1 loading 0 queue 0",
    ]


def test_the_first_silence_is_forgiven_the_next_ones_are_charged() -> None:
    story = Story(max_queue_delay=0.0, worker_timeout=100.0).with_frontend().with_workers("w0")
    story.submit(1)
    failed: list[str] = []
    silences = 0
    while not failed:
        lines = story.wait(1.0)
        silences += 1
        failed = [line for line in lines if line.startswith("fail")]
        story.back("w0")
    assert failed == ["fail -> f0: 1 worker_died input 0"]
    assert silences == 4


def test_silent_for_worker_timeout_it_is_killed() -> None:
    story = Story(worker_timeout=3.0).with_frontend().with_workers("w0")
    assert "kill w0 2000" not in story.wait(2.9)
    assert "kill w0 2000" in story.wait(0.2)
    assert [(each.id, each.state) for each in story.report().workers] == [("worker-0", "gone")]
    assert story.feed(beat("w0")) == ["introduce -> w0"]


def test_worker_timeout_below_a_second() -> None:
    story = Story(worker_timeout=0.5).with_frontend().with_workers("w0")
    assert "kill w0 2000" in story.wait(0.51)


def test_a_batch_over_batch_timeout_kills_its_worker_and_is_charged() -> None:
    story = Story(max_queue_delay=0.0, batch_timeout=2.0, max_batch_size=4).with_frontend().with_workers("w0", "w1")
    story.feed(submit(1, [1] * 4))
    lines = without_logs(story.wait_alive(2.1, "w0", "w1"))
    # They were charged, so they are suspects; one by one, because the next one that hangs takes as long again.
    assert lines[:2] == ["kill w0 2000", "batch 2 -> w1: 1.0"]
    assert story.done("w1", 2) == ["result -> f0: 1.0", "batch 3 -> w1: 1.1"]


def test_a_batch_that_waited_behind_the_one_that_hung_is_not_charged() -> None:
    """Batches end in their order: its turn never came."""
    story = Story(max_queue_delay=0.0, batch_timeout=2.0, max_batch_size=2).with_frontend()
    story.with_workers("w0", limits=WorkerLimits(ROOMY.max_batch_size, ROOMY.max_num_tokens, overlaps=True))
    story.feed(submit(1, [1] * 4))
    assert [inputs_of(batch) for batch in story.sent.values()] == [[(1, 0), (1, 1)], [(1, 2), (1, 3)]]
    lines = story.wait_alive(2.1, "w0")
    assert "log: worker killed: a batch runs for over 2 s (batch_timeout)" in lines
    story.open.clear()
    story.with_workers("w1")
    assert inputs_of(story.sent[3]) == [(1, 0)]
    assert story.done("w1", 3) == ["result -> f0: 1.0", "batch 4 -> w1: 1.1"]
    assert story.done("w1", 4) == ["result -> f0: 1.1", "batch 5 -> w1: 1.2 1.3"]


def test_a_suspect_that_takes_long_holds_up_no_other() -> None:
    story = Story(max_queue_delay=0.0, batch_timeout=20.0, max_batch_size=2).with_frontend()
    story.with_workers("w0", "w1", "w2", "w3")
    story.feed(submit(1, [1] * 2))
    assert "batch 2 -> w1: 1.0" in without_logs(story.wait_alive(20.1, "w0", "w1", "w2", "w3"))
    assert story.wait_alive(HELD_UP_S - 0.2, "w1", "w2", "w3") == []
    assert story.wait_alive(0.3, "w1", "w2", "w3") == ["batch 3 -> w2: 1.1"]
    assert story.done("w2", 3) == ["result -> f0: 1.1"]


def test_workers_that_hang_with_suspects_do_not_count_when_the_last_one_is_spared() -> None:
    story = Story(max_queue_delay=0.0, batch_timeout=12.0, max_batch_size=2).with_frontend().with_workers("w0", "w1", "w2")
    story.feed(submit(1, [1] * 2))
    assert "batch 2 -> w1: 1.0" in without_logs(story.wait_alive(12.1, "w0", "w1", "w2"))
    assert story.wait_alive(SPARED_S - 0.3, "w1", "w2") == [], "w2 is the only one that serves the others"
    assert story.wait_alive(0.4, "w1", "w2") == ["batch 3 -> w2: 1.1"]


def test_a_worker_that_drains_with_a_suspect_takes_no_other_ones_place() -> None:
    story = Story(max_queue_delay=0.0, batch_timeout=12.0, max_batch_size=2).with_frontend()
    story.with_workers("w0", "w1", "w2", "w3")
    story.feed(submit(1, [1] * 2))
    assert "batch 2 -> w1: 1.0" in without_logs(story.wait_alive(12.1, "w0", "w1", "w2", "w3"))
    story.feed(e.WorkerDrained(b"w1", []))
    assert "batch 3 -> w2: 1.1" in story.wait_alive(HELD_UP_S + 0.1, "w1", "w2", "w3"), "w3 is left for the others"


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("place", [0, 17, 31, 40])
def test_of_an_input_that_hangs_only_itself_is_late(workers: int, place: int) -> None:
    """Requests have twice the time of a batch, as by default. A worker is back after a third of a batch's."""
    story = Story(max_queue_delay=0.0, max_batch_size=32, batch_timeout=12.0).with_frontend()
    overlapping = WorkerLimits(32, ROOMY.max_num_tokens, overlaps=True)
    names = [f"w{slot}" for slot in range(workers)]
    story.with_workers(*names, limits=overlapping)
    lines = story.feed(*(submit(rid, ttl_s=24.0) for rid in range(64)))
    back_at: dict[str, float] = {}
    end = story.now + 23.9
    while story.now < end:
        for name in names:
            if name in back_at and story.now >= back_at[name]:
                del back_at[name]
                story.with_workers(name, limits=overlapping)
            while (batches := story.open.get(name)) and (place, 0) not in inputs_of(story.sent[batches[0]]):
                lines += story.done(name, batches[0])
        lines += (waited := story.wait_alive(0.25, *(name for name in names if name not in back_at)))
        for name in names:
            if f"kill {name} 200{name[1:]}" in waited:
                back_at[name] = story.now + 4.0
                story.open.pop(name)
    results = [word for line in lines if line.startswith("result") for word in line.split()[3:]]
    assert sorted(results) == sorted(f"{rid}.0" for rid in range(64) if rid != place)
    assert {line.split()[3] for line in lines if line.startswith("fail")} <= {str(place)}


def test_the_batch_at_hand_does_not_run_out_of_time_while_it_waits() -> None:
    story = Story(max_queue_delay=0.0, batch_timeout=2.0, max_batch_size=1).with_frontend().with_workers("w0")
    story.feed(submit(1, [1, 1]))
    story.wait_alive(1.5, "w0")
    story.done("w0", 1)
    assert not [line for line in story.wait_alive(1.5, "w0") if line.startswith("kill")]


def test_a_beat_that_tells_of_a_stuck_kernel_kills() -> None:
    story = Story(batch_timeout=2.0).with_frontend().with_workers("w0")
    assert "kill w0 2000" in story.feed(beat("w0", batch_id=9, busy_ms=2500))


def test_a_loading_worker_may_be_silent_for_longer() -> None:
    story = Story(worker_timeout=1.0).with_frontend()
    story.feed(announce("w0"))
    assert story.wait(5.9) == []
    assert "kill w0 2000" in story.wait(0.2)


def test_silence_while_the_broker_itself_did_not_run_is_excused() -> None:
    story = Story(max_queue_delay=0.0).with_frontend().with_workers("w0")
    story.submit(1)
    story.now += 5.0
    assert story.feed(e.BrokerStalled(4.9)) == ["log: the broker itself did not run for 4.9 s"]
    assert story.report().workers[0].state == "busy"
    assert story.done("w0", 1) == ["result -> f0: 1.0"]


def test_after_a_stall_of_the_broker_everybody_has_time_to_be_heard() -> None:
    """What they said meanwhile may be on its way still: the broker's own sockets did not run either."""
    story = Story(max_queue_delay=0.0, worker_timeout=3.0).with_frontend().with_workers("w0")
    story.submit(1)
    due_at = story.core.next_deadline()
    assert due_at is not None
    story.now = due_at + 5.0
    assert story.feed(e.BrokerStalled(5.0)) == ["log: the broker itself did not run for 5.0 s"]
    assert story.wait(0.9) == []
    assert without_logs(story.wait(0.1)) == ["state -> f0: ready 0 loading 0 queue 1"]


def test_a_stall_of_the_broker_is_no_running_time_of_batches() -> None:
    story = Story(max_queue_delay=0.0, batch_timeout=30.0, max_batch_size=1).with_frontend().with_workers("w0")
    story.feed(submit(1, [1, 1], ttl_s=1000.0), hello("w1"))
    story.now += 35.0
    story.feed(e.BrokerStalled(35.0))
    assert not [line for line in story.wait_alive(1.0, "w0") if line.startswith("kill")]
    assert story.done("w0", 1) == ["result -> f0: 1.0"]
    # Nor does it count for its speed: what waits behind is not refused.
    story.done("w0", 2)
    story.submit(2, [1] * 4)
    assert story.submit(3, ttl_s=10.0) == []


def test_a_stopped_worker_gets_nothing_new() -> None:
    story = Story(max_queue_delay=0.0).with_frontend().with_workers("w0", "w1")
    story.wait_alive(1.1, "w1")
    lines = [line for rid in range(3) for line in story.submit(rid)]
    assert all("w1" in line for line in lines)
