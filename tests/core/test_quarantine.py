"""An input that was found guilty is refused when it is asked for again, and nobody else is."""

from __future__ import annotations

from array import array

from broker_story import Story, lost, without_logs
from packhorse_broker import events as e
from packhorse_broker.quarantine import KEPT_S, MOST_INPUTS, Quarantine
from packhorse_shared.messages import EncodeOptions, SubmittedRequest


def ask(rid: int, *inputs: list[int], resubmitted: bool = False) -> e.RequestsSubmitted:
    """A request with these very ids."""
    ids = array("i", [token for each in inputs for token in each]).tobytes()
    request = SubmittedRequest(rid, [len(each) for each in inputs], 60_000, 0, EncodeOptions(), resubmitted)
    return e.RequestsSubmitted(b"f0", [request], ids)


def guilty_story(worker_deaths: int = 3) -> Story:
    """A story in which ids 7 7 7 have made that many workers die."""
    story = Story(max_queue_delay=0.0).with_frontend()
    for death in range(worker_deaths):
        story.with_workers("w0")
        if death == 0:
            story.feed(ask(1, [7, 7, 7]))
        story.feed(lost("w0"))
    return story.with_workers("w9")


def test_a_guilty_input_is_refused_when_it_is_asked_for_again() -> None:
    story = guilty_story()
    assert story.feed(ask(2, [7, 7, 7])) == ["fail -> f0: 2 worker_died input 0"]
    assert story.feed(ask(3, [10_003 - 3], [7, 7, 7])) == ["fail -> f0: 3 worker_died input 1"]
    assert story.feed(ask(4, [7, 7, 7], resubmitted=True)) == ["fail -> f0: 4 worker_died input 0"]


def test_others_are_let_in() -> None:
    story = guilty_story()
    assert story.feed(ask(2, [20_000, 20_000, 20_000])) == ["batch 4 -> w9: 2.0"]
    assert story.feed(ask(3, [30_000] * 2), ask(4, [40_000] * 4)) == []
    assert story.done("w9", 4) == ["result -> f0: 2.0", "batch 5 -> w9: 3.0 4.0"]


def test_an_input_that_was_not_out_of_attempts_is_not_guilty() -> None:
    story = guilty_story(worker_deaths=2)
    assert without_logs(story.feed(ask(2, [7, 7, 7]))) == []


def test_it_is_forgotten_after_a_while() -> None:
    story = guilty_story()
    story.wait_alive(KEPT_S + 1, "w9")
    assert story.with_frontend().feed(ask(2, [7, 7, 7]))[0].startswith("batch 4 -> w9")


def test_silences_make_nobody_guilty() -> None:
    story = Story(max_queue_delay=0.0, worker_timeout=100.0).with_frontend().with_workers("w0")
    story.feed(ask(1, [7, 7, 7]))
    lines: list[str] = []
    while not [line for line in lines if line.startswith("fail")]:
        lines = story.wait(1.0)
        story.back("w0")
    assert story.feed(ask(2, [7, 7, 7]))[0].startswith("batch")


def test_it_is_bounded_and_the_oldest_go_first() -> None:
    quarantine = Quarantine()
    for number in range(MOST_INPUTS + 10):
        quarantine.add(array("i", [number, number]).tobytes(), now=float(number) / 1000)
    assert len(quarantine) == MOST_INPUTS
    found = [quarantine.find([2], array("i", [number, number]).tobytes(), now=2.0) for number in (9, 10, MOST_INPUTS + 9)]
    assert found == [None, 0, 0]


def test_one_that_is_found_guilty_again_starts_its_time_anew() -> None:
    quarantine = Quarantine()
    ids = array("i", [1, 2]).tobytes()
    quarantine.add(ids, now=0.0)
    quarantine.add(ids, now=KEPT_S - 1)
    assert quarantine.find([2], ids, now=KEPT_S + 1) == 0
    assert quarantine.find([2], ids, now=2 * KEPT_S) is None
    assert quarantine.find([2], ids, now=0.0) is None, "its length is still looked for"
