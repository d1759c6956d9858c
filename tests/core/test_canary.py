"""A worker sees no user's input before it has answered the canary rightly, at the start and after every silence."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from broker_story import BOOT_ID, CANARY_ROW, MODEL, Story, announce, beat, hello, lost, without_logs
from packhorse_broker import events as e
from packhorse_shared.messages import BatchFailed, Done, ErrorCode, InputFailure


def with_tested(story: Story, worker: str) -> Story:
    """A worker that has said hello and has its canary."""
    story.feed(hello(worker))
    return story


def killed(lines: Sequence[str]) -> list[str]:
    return [line for line in lines if line.startswith(("kill", "log: worker killed"))]


def test_no_input_before_the_canary_is_answered() -> None:
    story = with_tested(Story(max_queue_delay=0.0).with_frontend(), "w0")
    assert story.submit(1) == ["fail -> f0: 1 loading retry 5"]
    assert story.submit(2, resubmitted=True) == []
    assert story.passed("w0") == [
        "log: worker ready",
        "join -> w0",
        "batch 1 -> w0: 2.0",
        "state -> f0: ready 1 loading 0 queue 0",
    ]


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ((0.5, float("nan")), "it is not finite"),
        ((0.5, float("-inf")), "it is not finite"),
        ((0.5,), "it has rows of [1] values instead of one of 2"),
        ((0.5, -0.5, 0.5), "it has rows of [3] values instead of one of 2"),
    ],
)
def test_an_answer_that_no_model_gives_kills(row: Sequence[float], fault: str) -> None:
    story = with_tested(Story().with_frontend(), "w0")
    lines = story.passed("w0", row)
    assert killed(lines) == ["kill w0 2000", f"log: worker killed: its answer to the canary is wrong: {fault}"]
    assert story.report().model is None


@pytest.mark.parametrize("value", [0.5, 0.4])
def test_workers_must_not_contradict_each_other(value: float) -> None:
    story = with_tested(Story().with_workers("w0"), "w1")
    lines = story.passed("w1", (value, -0.5))
    if value == CANARY_ROW[0]:
        assert lines[0] == "log: worker ready"
    else:
        assert killed(lines)[1].endswith(
            "it differs by 0.1 from what other workers of this model gave, whose largest value is 0.5"
        )


def test_a_single_logit_near_zero_says_nothing_about_how_exact_it_is() -> None:
    """Half a percent of a hidden value is far more than a tenth of a logit that happens to be 0.002."""
    ranker = msgspec.structs.replace(MODEL, task="rerank", dimension=1)
    story = Story()
    for worker, logit in (("w0", 0.002), ("w1", -0.011)):
        story.feed(hello(worker, model=ranker))
        assert story.passed(worker, (logit,))[0] == "log: worker ready"
    story.feed(hello("w2", model=ranker))
    assert killed(story.passed("w2", (0.2,)))


def test_the_measure_goes_with_the_last_worker_that_agrees() -> None:
    """One worker whose device computes nonsense must not keep all others out for ever."""
    story = Story().with_workers("w0", "w1")
    story.feed(lost("w0"))
    assert killed(with_tested(story, "w2").passed("w2", (9.0, 9.0)))
    story.feed(lost("w1"))
    assert with_tested(story, "w3").passed("w3", (9.0, 9.0))[0] == "log: worker ready"


def test_a_canary_that_fails_kills() -> None:
    story = with_tested(Story(), "w0")
    failed = BatchFailed(
        BOOT_ID, story.canaries["w0"], ErrorCode.FORWARD_FAILED, "the worker failed: KeyError", retryable=False
    )
    lines = killed(story.feed(e.BatchBroke(b"w0", failed)))
    assert lines[1].endswith("it failed (forward_failed): the worker failed: KeyError")
    with_tested(story, "w1")
    failure = InputFailure(0, ErrorCode.NON_FINITE_OUTPUT, "not finite")
    done = Done(BOOT_ID, story.canaries["w1"], [0], [failure], 1.0)
    assert killed(story.feed(e.BatchFinished(b"w1", done, b"")))[1].endswith("it failed (non_finite_output): not finite")


def test_a_worker_without_room_gets_another_canary_when_it_is_free() -> None:
    """It still runs a batch for a broker that is gone."""
    story = with_tested(Story(), "w0")
    failed = BatchFailed(BOOT_ID, story.canaries["w0"], ErrorCode.NO_WORKER, "this worker takes no batch now", retryable=True)
    assert story.feed(e.BatchBroke(b"w0", failed)) == []
    assert story.feed(beat("w0", batch_id=5)) == []
    assert story.back("w0") == ["canary -> w0", "log: worker ready", "join -> w0"]


def test_a_canary_that_is_never_answered_kills_at_the_batch_timeout() -> None:
    story = with_tested(Story(batch_timeout=2.0), "w0")
    story.open["w0"] = [story.canaries["w0"]]  # its beats tell so
    lines = story.wait_alive(2.1, "w0")
    assert killed(lines)[1] == "log: worker killed: it has not answered the canary for over 2 s (batch_timeout)"


def test_an_answer_that_comes_after_a_silence_counts_for_nothing() -> None:
    story = Story(max_queue_delay=0.0).with_frontend().with_workers("w0")
    first = story.canary_answer("w0")
    story.submit(1)
    story.wait(1.0)
    assert without_logs(story.feed(first)) == []
    assert story.feed(beat("w0"))[0] == "canary -> w0"
    story.wait(1.0)  # silent once more, the canary with it
    late = story.canary_answer("w0")
    assert without_logs(story.feed(late)) == []
    assert "batch 2 -> w0: 1.0" in story.back("w0")


def test_a_worker_that_comes_back_and_computes_nonsense_is_killed() -> None:
    story = Story(max_queue_delay=0.0).with_frontend().with_workers("w0", "w1")
    story.wait_alive(1.1, "w1")
    assert story.report().workers[0].state == "gone"
    assert story.feed(beat("w0"))[0] == "canary -> w0"
    assert story.report().workers[0].state == "gone"
    assert killed(story.passed("w0", (0.0, 0.0)))


def test_a_worker_that_drains_while_it_is_tested_just_leaves() -> None:
    story = with_tested(Story(), "w0")
    answer = story.canary_answer("w0")
    assert story.feed(e.WorkerDrained(b"w0", [story.canaries["w0"]])) == ["log: worker drains"]
    assert story.feed(answer) == []
    assert story.wait_alive(2.0, "w0") == []
    assert story.feed(e.WorkerLeft(b"w0", "")) == ["log: worker left"]


def test_of_two_models_at_once_the_one_that_passes_first_is_served() -> None:
    story = with_tested(Story().with_frontend(), "w0")
    story.feed(hello("w1", model=msgspec.structs.replace(MODEL, name="other", fingerprint="f2")))
    story.passed("w1")
    lines = story.passed("w0")
    assert lines[0] == "refused -> w0"
    assert story.report().model is not None
    assert [each.state for each in story.report().workers] == ["gone", "ready"]


def test_two_that_say_to_serve_the_same_and_do_not_agree_on_its_size() -> None:
    """Both were tested before there was a measure; the first one that passes is it."""
    story = with_tested(Story().with_frontend(), "w0")
    story.feed(hello("w1", model=msgspec.structs.replace(MODEL, dimension=3)))
    story.passed("w0")
    lines = story.passed("w1", (0.5, -0.5, 0.5))
    assert killed(lines)[1].endswith("it has rows of [3] values instead of one of 2")


def test_token_level_models_answer_with_a_row_for_each_token() -> None:
    story = Story()
    story.feed(hello("w0", model=msgspec.structs.replace(MODEL, task="token_reward")))
    assert story.passed("w0", (0.5, -0.5, 0.25, 0.0))[0] == "log: worker ready"


def test_a_hello_said_again_brings_the_canary_again() -> None:
    """What was sent before a connection broke may be lost."""
    story = with_tested(Story(), "w0")
    first = story.canary_answer("w0")
    assert story.feed(hello("w0")) == ["canary -> w0"]
    assert story.feed(first) == []
    assert story.passed("w0")[0] == "log: worker ready"


def test_work_that_never_reached_its_worker_is_sent_again() -> None:
    story = Story(max_queue_delay=0.0, max_batch_size=1).with_frontend().with_workers("w0")
    story.submit(1, [1, 1])
    story.open["w0"] = []  # a connection broke, and took both batches along
    lines = story.wait_alive(1.3, "w0")
    assert lines == ["log: worker never got its work: it is sent again", "batch 3 -> w0: 1.0", "batch 4 -> w0: 1.1"]
    assert story.done("w0", 3) == ["result -> f0: 1.0"]


def test_a_canary_that_never_reached_its_worker_is_sent_again() -> None:
    story = with_tested(Story(), "w0")
    lines = story.wait_alive(1.3, "w0")
    assert lines == ["log: worker never got the canary: it is sent again", "canary -> w0"]
    assert story.passed("w0")[0] == "log: worker ready"


def test_a_beat_between_the_end_of_a_batch_and_its_answer_moves_nothing() -> None:
    story = Story(max_queue_delay=0.0).with_frontend().with_workers("w0")
    story.submit(1)
    story.wait_alive(2.0, "w0")
    assert story.feed(beat("w0")) == []
    assert story.done("w0", 1) == ["result -> f0: 1.0"]


def test_a_worker_that_loads_is_sent_nothing_however_often_it_beats() -> None:
    story = Story()
    story.feed(announce("w0"))
    assert story.wait_alive(3.0, "w0") == []
