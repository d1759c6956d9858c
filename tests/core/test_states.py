"""Who joins, who is refused, and what everybody is told."""

from __future__ import annotations

import msgspec
import pytest

from broker_story import MODEL, Story, announce, beat, hello, lost, submit
from packhorse_broker import events as e
from packhorse_shared.codec import MAX_HEADER_BYTES, encode
from packhorse_shared.messages import PROTOCOL_VERSION, FrontendHello


def test_a_worker_announces_itself_loads_and_joins() -> None:
    story = Story().with_frontend()
    assert story.feed(announce("w0")) == [
        "watch w0 2000",
        "log: worker loads the model",
        "state -> f0: ready 0 loading 1 queue 0",
    ]
    assert story.report().workers[0].state == "loading"
    assert story.feed(hello("w0")) == ["canary -> w0"]
    assert story.report().workers[0].state == "loading"
    assert story.report().model is None
    assert story.passed("w0") == ["log: worker ready", "join -> w0", "state -> f0: ready 1 loading 0 queue 0"]
    assert story.report().workers[0].state == "ready"
    assert story.report().model is not None


def test_a_worker_that_introduces_itself_again_keeps_its_work() -> None:
    story = Story(max_queue_delay=0.0).with_frontend().with_workers("w0")
    story.submit(1)
    assert story.feed(hello("w0")) == ["join -> w0"]
    assert story.done("w0", 1) == ["result -> f0: 1.0"]


def test_a_new_incarnation_under_the_same_identity_replaces_the_old_one() -> None:
    story = Story(max_queue_delay=0.0).with_frontend().with_workers("w0")
    story.submit(1)
    story.feed(hello("w0", incarnation=2))
    lines = story.passed("w0")
    assert "batch 2 -> w0: 1.0" in lines


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"token": "x" * 64}, "its token is not the one in the run directory (worker.token)"),
        ({"version": 99}, f"it speaks protocol 99, this broker {PROTOCOL_VERSION}; run one version of packhorse"),
        (
            {"model": msgspec.structs.replace(MODEL, fingerprint="f2")},
            "it serves another model, or the same one in another way, than tiny as the first worker loaded it",
        ),
    ],
)
def test_a_worker_that_does_not_fit_is_refused(fields: dict[str, object], reason: str) -> None:
    story = Story(max_queue_delay=0.0).with_frontend().with_workers("w0")
    story.feed(announce("w1"))
    lines = story.feed(hello("w1", **fields))  # type: ignore[arg-type]  # one of hello's own keywords each
    assert lines == ["refused -> w1", f"log: worker refused: {reason}", "state -> f0: ready 1 loading 0 queue 0"]
    assert story.submit(1) == ["batch 1 -> w0: 1.0"]


def test_a_worker_whose_hello_cannot_be_read_is_refused_and_its_work_moved() -> None:
    story = Story(max_queue_delay=0.0).with_frontend().with_workers("w0", "w1")
    assert story.submit(1) == ["batch 1 -> w0: 1.0"]
    lines = story.feed(e.WorkerOutdated(b"w0", 1))
    assert lines[0] == "refused -> w0"
    assert f"log: worker refused: it speaks protocol 1, this broker {PROTOCOL_VERSION}; run one version of packhorse" in lines
    assert "batch 2 -> w1: 1.0" in lines
    assert story.feed(e.WorkerOutdated(b"stranger", 3))[0] == "refused -> stranger"


def test_a_refused_announce_leaves_nothing_behind() -> None:
    story = Story()
    assert story.feed(announce("w0", token="no"))[0] == "refused -> w0"
    assert story.report().workers == []


def test_unknown_workers_are_asked_to_introduce_themselves() -> None:
    assert Story().feed(beat("w5")) == ["introduce -> w5"]


def test_a_frontend_of_another_version_is_not_let_in() -> None:
    story = Story()
    lines = story.feed(e.FrontendGreeted(b"f0", FrontendHello(99, 0, 1)))
    assert lines == [f"log: frontend refused: it speaks protocol 99, this broker {PROTOCOL_VERSION}"]
    assert story.feed(submit(1)) == ["introduce -> f0"]


def test_a_frontends_hello_is_answered_every_time_and_it_joins_once() -> None:
    story = Story()
    greeted = e.FrontendGreeted(b"f0", FrontendHello(PROTOCOL_VERSION, 0, 1000))
    assert story.feed(greeted) == ["watch f0 1000", "log: frontend joined", "state -> f0: ready 0 loading 0 queue 0"]
    assert story.feed(greeted) == ["state -> f0: ready 0 loading 0 queue 0"]


def test_a_gone_worker_is_shown_for_a_minute_and_replaced_by_its_successor() -> None:
    story = Story().with_workers("w0", "w1")
    story.feed(lost("w0"), lost("w1"))
    assert [each.state for each in story.report().workers] == ["gone", "gone"]
    story.wait(30.0)
    story.feed(hello("w0", incarnation=2))
    story.passed("w0")
    assert [(each.id, each.state) for each in story.report().workers] == [("worker-0", "ready"), ("worker-1", "gone")]
    story.wait_alive(31.0, "w0")
    assert [each.id for each in story.report().workers] == ["worker-0"]


def test_a_worker_started_by_hand_is_named_by_its_pid() -> None:
    story = Story()
    by_hand = hello("w0")
    story.feed(e.WorkerGreeted(b"w0", msgspec.structs.replace(by_hand.hello, slot=-1, pid=4711)))
    assert story.report().workers[0].id == "worker-4711"


def test_the_status_of_very_many_workers_fits_into_a_message() -> None:
    """Anybody of this machine may ask for it: it must not end the broker. Who is gone is left out first."""
    story = Story()
    story.feed(*(announce(f"w{number}") for number in range(40)))
    story.feed(*(lost(f"w{number}") for number in range(40)))
    for number in range(40, 640):
        seen = announce(f"w{number}")
        story.feed(e.WorkerAnnounced(seen.worker, msgspec.structs.replace(seen.announce, device="\N{SNOWMAN}" * 256)))
    report = story.report()
    assert len(b"".join(encode(report)[:2])) <= MAX_HEADER_BYTES
    assert len(report.workers) > 40
    assert {each.state for each in report.workers} == {"loading"}


def test_a_model_that_no_frontend_could_be_told_of_is_refused() -> None:
    prompts = {f"{number}": "x" * 8000 for number in range(8)}
    story = Story()
    lines = story.feed(hello("w0", model=msgspec.structs.replace(MODEL, prompts=prompts)))
    assert lines[0] == "refused -> w0"
    assert lines[1].startswith("log: worker refused: what it tells of its model takes 64")


def test_the_status_counts() -> None:
    story = Story(max_queue_delay=0.0, max_batch_size=2).with_frontend().with_workers("w0")
    story.submit(1, [3, 4, 5, 6, 7])
    story.now += 0.5
    story.done("w0", 1)
    report = story.report()
    worker = report.workers[0]
    # Two of five are done; two run; the fifth may not be handed over yet, since it fills no batch.
    assert (worker.state, worker.in_flight, worker.batches, worker.inputs, worker.tokens) == ("busy", 2, 1, 2, 7)
    assert (report.queue.inputs, report.queue.requests, report.queue.limit) == (1, 1, 2048)
    assert report.queue.oldest_wait_ms == 500.0
    assert report.rates.tokens_per_s == 7.0


def test_busy_is_a_share_of_the_last_seconds() -> None:
    story = Story(max_queue_delay=0.0).with_frontend().with_workers("w0")
    for rid in range(1, 41):
        story.submit(rid)
        story.now += 0.05
        story.done("w0", rid)
        story.now += 0.15
        story.feed(beat("w0"))
    assert story.report().workers[0].busy == pytest.approx(0.25, abs=0.03)
    assert story.report().rates.requests_per_s == pytest.approx(5.0, rel=0.1)
    story.wait_alive(10.0, "w0")
    assert story.report().workers[0].busy == 0
    assert story.report().rates.requests_per_s == 0
