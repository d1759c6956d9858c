"""Workers of other machines: a key instead of a token, no pid, and links that are cut."""

from __future__ import annotations

import msgspec

from broker_story import TOKEN, Story, announce, beat, hello, submit, without_logs
from packhorse_broker import events as e


def remote_hello(worker: str, key_name: str = "gpu1", **fields: object) -> e.WorkerGreeted:
    """One that showed a key as it connected."""
    return msgspec.structs.replace(hello(worker, token="", **fields), key_name=key_name)  # type: ignore[arg-type]


def story_with_remote(*workers: str, **values: object) -> Story:
    story = Story(**{"max_queue_delay": 0.0} | values).with_frontend()
    for worker in workers:
        story.feed(remote_hello(worker))
        story.passed(worker)
    return story


def cut(worker: str) -> e.WorkerUnreachable:
    return e.WorkerUnreachable(worker.encode())


def test_a_key_counts_for_a_token_and_its_pid_is_not_watched() -> None:
    story = Story().with_frontend()
    lines = story.feed(msgspec.structs.replace(announce("w0", token=""), key_name="gpu1"))
    assert lines[:2] == ["watch w0 0", "log: worker loads the model"]
    assert story.feed(remote_hello("w0"))[0] == "canary -> w0"
    assert story.passed("w0")[:2] == ["log: worker ready", "join -> w0"]
    assert [(each.id, each.pid) for each in story.report().workers] == [("worker-gpu1-2000", 2000)]


def test_without_a_key_the_token_must_be_right() -> None:
    story = Story()
    assert without_logs(story.feed(hello("w0", token=""))) == ["refused -> w0"]
    assert without_logs(story.feed(remote_hello("w0", key_name=""))) == ["refused -> w0"]
    assert without_logs(story.feed(hello("w0", token=TOKEN)))[-1] == "canary -> w0"


def test_workers_of_two_machines_with_the_same_pid_are_told_apart() -> None:
    story = Story()
    for worker, key_name in ((b"x", "gpu1"), (b"y", "gpu2")):
        story.feed(msgspec.structs.replace(remote_hello("w0"), worker=worker, key_name=key_name))
    assert [each.id for each in story.report().workers] == ["worker-gpu1-2000", "worker-gpu2-2000"]


def test_what_is_wrong_with_it_is_judged_by_heartbeats_and_told_to_it() -> None:
    story = story_with_remote("w0", worker_timeout=3.0)
    lines = story.wait(3.1)
    assert "kill w0 2000" in lines
    assert "log: worker told to end itself: silent for 3.0 s (worker_timeout)" in lines


def test_a_key_that_is_taken_away_ends_it_and_blames_nobody() -> None:
    story = story_with_remote("w0")
    story.submit(1)
    lines = story.feed(e.WorkerDisallowed(b"w0"))
    assert lines[:2] == ["refused -> w0", "log: worker refused: its key was taken away"]
    assert story.feed(e.WorkerDisallowed(b"w0")) == []
    assert story.feed(e.WorkerDisallowed(b"stranger")) == []
    story.feed(hello("w1"))
    assert "batch 2 -> w1: 1.0" in story.passed("w1")


def test_a_cut_link_moves_its_work_at_once_and_it_rejoins_by_the_canary() -> None:
    story = story_with_remote("w0", "w1")
    story.submit(1)
    late = story.done_event("w0", 1)
    assert without_logs(story.feed(cut("w0"))) == ["batch 2 -> w1: 1.0", "state -> f0: ready 1 loading 0 queue 0"]
    assert story.feed(cut("w0")) == []
    assert story.report().workers[0].state == "gone"
    assert story.feed(late) == []
    assert story.feed(beat("w0", batch_id=1)) == []
    assert without_logs(story.feed(beat("w0")))[0] == "canary -> w0"
    assert without_logs(story.passed("w0"))[0] == "join -> w0"
    assert story.done("w1", 2) == ["result -> f0: 1.0"]


def test_links_that_are_cut_again_and_again_make_no_input_guilty() -> None:
    """The first time is forgiven, as a silence is. An input that sees four of them fails, but is not put into quarantine."""
    story = story_with_remote("w0")
    story.submit(1)
    failed: list[str] = []
    for _ in range(4):
        failed += [line for line in story.feed(cut("w0")) if line.startswith("fail")]
        story.back("w0")
    assert failed == ["fail -> f0: 1 worker_died input 0"]
    assert "batch 5 -> w0: 1.0" in story.submit(1)


def test_a_cut_link_that_stays_so_ends_in_worker_timeout() -> None:
    story = story_with_remote("w0", worker_timeout=3.0)
    story.feed(cut("w0"))
    lines = story.wait(3.1)
    assert "kill w0 2000" in lines
    assert story.feed(cut("w0")) == []


def test_a_cut_link_of_one_that_loads_or_drains() -> None:
    story = Story().with_frontend()
    story.feed(msgspec.structs.replace(announce("w0", token=""), key_name="gpu1"))
    assert story.feed(cut("w0")) == []
    assert story.feed(beat("w0")) == []
    story.feed(remote_hello("w0"))
    assert "join -> w0" in story.passed("w0")
    story.feed(e.WorkerDrained(b"w0", []))
    story.feed(cut("w0"))
    assert story.feed(beat("w0")) == []
    assert story.report().workers[0].state == "draining"
    assert without_logs(story.feed(e.WorkerLeft(b"w0", ""))) == []


def test_a_canary_that_meets_a_cut_link_is_sent_again() -> None:
    story = Story().with_frontend()
    story.feed(remote_hello("w0"))
    story.feed(cut("w0"))
    assert without_logs(story.feed(beat("w0")))[0] == "canary -> w0"
    assert "join -> w0" in story.passed("w0")


def test_a_batch_whose_answer_was_lost_is_sent_again_when_the_next_one_is_answered() -> None:
    """A link that was cut and is back took a message along. The worker is busy with the next batch and will never say more."""
    story = story_with_remote("w0", max_batch_size=1)
    story.feed(submit(1, [1, 1, 1]))
    lines = without_logs(story.done("w0", 2))
    assert lines == ["result -> f0: 1.1", "batch 3 -> w0: 1.0", "batch 4 -> w0: 1.2"]
    assert story.done("w0", 1) == []
    assert without_logs(story.done("w0", 3)) == ["result -> f0: 1.0"]
    assert without_logs(story.done("w0", 4)) == ["result -> f0: 1.2"]
