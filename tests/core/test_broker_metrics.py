"""What the broker counts, event by event; and that what frontends tell is added up, whoever they are and however they end."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import msgspec
import pytest

from broker_story import TOKEN, Story, announce, hello, lost, submit, submit_many
from packhorse_broker import events as e
from packhorse_broker.retries import SPARED_S
from packhorse_shared import messages as m
from packhorse_shared import metrics
from packhorse_shared.meter import CELLS, FRONTEND_CELLS, Reading, buckets_of, cell_of, readings_of

WORKER_LIMITS = m.WorkerLimits(max_batch_size=4, max_num_tokens=100)


def report(story: Story) -> list[float]:
    """The body of a MetricsReport, which changes nothing and is asked for by a stranger."""
    actions = story.core.handle(e.MetricsAsked(b"s0"), story.now)
    assert [type(action) for action in actions] == [e.TellFrontend]
    assert isinstance(actions[0], e.TellFrontend)
    assert isinstance(actions[0].message, m.MetricsReport)
    return actions[0].message.values


def numbers(story: Story, metric: metrics.Metric) -> dict[str, float]:
    """A metric's series that are not 0, by their label values; counts of histograms."""
    found = {
        " ".join(each.labels): each.counts[-1] if each.counts else each.value for each in readings_of(metric, report(story))
    }
    return {labels: value for labels, value in found.items() if value}


def number(story: Story, metric: metrics.Metric) -> float:
    return numbers(story, metric).get("", 0.0)


def histogram(story: Story, metric: metrics.Metric) -> Reading:
    (found,) = readings_of(metric, report(story))
    return found


def busy(**values: Any) -> Story:
    """One worker that runs one batch and has one at hand."""
    story = Story(max_queue_delay=0.0, **values).with_frontend().with_workers("w0", limits=WORKER_LIMITS)
    story.feed(submit_many([(901, [1]), (902, [1])]))
    story.submit(903)
    return story


def test_a_new_broker_has_counted_nothing_and_every_series_is_there() -> None:
    values = report(Story(max_queue_size=77))
    assert len(values) == CELLS
    not_zero = {cell for cell, value in enumerate(values) if value}
    assert not_zero == {cell_of(metrics.QUEUE_LIMIT_INPUTS), cell_of(metrics.BUILD_INFO, *metrics.BUILD_INFO.series[0])}
    assert values[cell_of(metrics.QUEUE_LIMIT_INPUTS)] == 77


def test_a_batch_counts_when_it_leaves_and_when_it_comes_back() -> None:
    story = Story(max_batch_size=4, max_queue_delay=0.5).with_frontend().with_workers("w0", limits=WORKER_LIMITS)
    story.feed(submit(1, [10, 20]), submit(9))
    story.now += 0.3
    story.submit(2, [30])
    assert histogram(story, metrics.BATCH_INPUTS) == Reading((), 4.0, (0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1))
    assert histogram(story, metrics.BATCH_TOKENS).value == 61
    assert histogram(story, metrics.BATCH_FILL_RATIO) == Reading((), 1.0, (0, 0, 0, 0, 0, 1, 1))
    assert histogram(story, metrics.ENCODE_SECONDS).counts[-1] == number(story, metrics.INPUTS) == 0
    story.now += 9.0
    story.done("w0", 1)
    waits = histogram(story, metrics.QUEUE_WAIT_SECONDS)
    assert waits.value == pytest.approx(3 * 0.3)
    assert waits.counts == (1, 1, 1, 1, 1, 1, 1, 1, 4, 4, 4, 4, 4)
    assert histogram(story, metrics.ENCODE_SECONDS).value == pytest.approx(0.004)
    assert (number(story, metrics.INPUTS), number(story, metrics.TOKENS)) == (4, 61)


def test_tokens_fill_a_batch_too() -> None:
    story = Story(max_queue_delay=0.0).with_frontend().with_workers("w0", limits=WORKER_LIMITS)
    story.submit(1, [80])
    assert histogram(story, metrics.BATCH_FILL_RATIO).value == pytest.approx(0.8)


def test_the_canary_is_no_batch_and_no_input() -> None:
    story = Story().with_frontend().with_workers("w0")
    assert histogram(story, metrics.BATCH_INPUTS).counts[-1] == 0
    assert histogram(story, metrics.ENCODE_SECONDS).counts[-1] == 0
    assert number(story, metrics.INPUTS) == 0


def test_inputs_whose_client_left_meanwhile_are_not_counted_as_answered() -> None:
    story = Story(max_batch_size=4, max_queue_delay=0.0).with_frontend().with_workers("w0")
    story.feed(submit_many([(1, [1, 1]), (2, [5])]))
    story.feed(e.RequestsCancelled(b"f0", [1]))
    story.done("w0", 1)
    assert (number(story, metrics.INPUTS), number(story, metrics.TOKENS)) == (1, 5)


def test_refusals_count_by_their_reason() -> None:
    story = Story(max_queue_delay=0.0, max_queue_size=1).with_frontend()
    story.submit(1)
    story.with_workers("w0", limits=WORKER_LIMITS)
    story.submit(2, [101])
    story.submit(3, ttl_s=0.0)
    for rid in (4, 5, 6):  # one runs, one waits
        story.submit(rid)
    assert numbers(story, metrics.REJECTED) == {"loading": 1, "too_long": 1, "too_late": 1, "queue_full": 1}
    story.feed(lost("w0"))
    story.submit(8)
    story.feed(e.DrainBegan())
    story.submit(9)
    assert numbers(story, metrics.REJECTED) == {
        "loading": 1,
        "too_long": 1,
        "too_late": 1,
        "queue_full": 1,
        "no_worker": 1,
        "draining": 1,
    }
    assert numbers(story, metrics.FAILED) == {}


def test_an_accepted_request_that_fails_is_no_refusal() -> None:
    story = busy(max_batch_size=1)
    failure = m.InputFailure(0, m.ErrorCode.NON_FINITE_OUTPUT, "")
    story.done("w0", 1, failures=[failure])
    story.submit(1, ttl_s=0.5)
    story.wait_alive(0.6, "w0")
    story.feed(e.BatchBroke(b"w0", m.BatchFailed(77, 2, m.ErrorCode.QUEUE_FULL, "odd", retryable=False)))
    assert numbers(story, metrics.FAILED) == {"non_finite_output": 1, "timeout": 1, "other": 1}
    assert numbers(story, metrics.REJECTED) == {}


def test_a_death_is_an_exit_and_makes_retries_of_what_ran() -> None:
    story = busy(max_batch_size=1)
    story.feed(lost("w0"))
    # 901 ran, 902 was at hand and never begun, 903 waited.
    assert number(story, metrics.RETRIES) == 1
    assert numbers(story, metrics.WORKER_EXITS) == {"lost": 1}


def test_a_poison_is_retried_twice_and_then_refused_by_quarantine() -> None:
    story = Story(max_batch_size=1, max_queue_delay=0.0).with_frontend()
    for number_of_worker in range(3):
        story.with_workers(f"w{number_of_worker}")
        if not number_of_worker:
            story.submit(1)
        if number_of_worker == 2:  # the last of several, which is spared for a while
            story.wait_alive(SPARED_S + 1, "w2")
        story.feed(lost(f"w{number_of_worker}"))
    assert number(story, metrics.RETRIES) == 2
    assert numbers(story, metrics.FAILED) == {"worker_died": 1}
    assert number(story, metrics.QUARANTINED_INPUTS) == 1
    story.with_workers("w3")
    story.submit(1)
    assert numbers(story, metrics.REJECTED) == {"quarantine": 1}


def test_a_silence_moves_its_work() -> None:
    story = busy(max_batch_size=1)
    story.wait(1.1)
    assert (number(story, metrics.SILENCES), number(story, metrics.RETRIES)) == (1, 1)
    assert numbers(story, metrics.WORKERS) == {"gone": 1}
    story.back("w0")
    story.wait(1.1)
    assert (number(story, metrics.SILENCES), number(story, metrics.RETRIES)) == (2, 2)


def test_workers_go_in_four_ways() -> None:
    story = Story().with_frontend().with_workers("w0", "w1", "w2")
    story.feed(e.WorkerLeft(b"w0", ""))
    story.feed(lost("w1"))
    story.feed(hello("w3"))
    story.passed("w3", row=(9.0, 9.0))
    story.feed(hello("w4", token="x" * len(TOKEN)))
    assert numbers(story, metrics.WORKER_EXITS) == {"left": 1, "lost": 1, "killed": 1, "refused": 1}
    assert number(story, metrics.CANARY_FAILURES) == 1


def test_gauges_tell_how_things_are_now() -> None:
    story = busy(max_batch_size=1)
    story.feed(announce("w1"), e.WorkerBeat(b"w0", m.Beat(1, 1.0, 5000)))
    story.now += 0.25
    found = {metric.name: number(story, metric) for metric in metrics.METRICS if metric.kind == "gauge" and not metric.labels}
    assert found.pop("packhorse_workers_busy_ratio") > 0
    assert found.pop("packhorse_uptime_seconds") == pytest.approx(0.25)
    assert found.pop("packhorse_queue_oldest_seconds") == pytest.approx(0.25)
    assert found == {
        "packhorse_queue_inputs": 1,
        "packhorse_queue_limit_inputs": story.settings.batching.max_queue_size,
        "packhorse_open_requests": 3,
        "packhorse_inputs_in_flight": 2,
        "packhorse_quarantined_inputs": 0,
        "packhorse_workers_memory_bytes": 5000,
        "packhorse_frontends": 1,
    }
    assert numbers(story, metrics.WORKERS) == {"busy": 1, "loading": 1}
    for batch in (1, 2, 3):
        story.done("w0", batch)
    for metric in (metrics.QUEUE_INPUTS, metrics.QUEUE_OLDEST_SECONDS, metrics.OPEN_REQUESTS, metrics.INPUTS_IN_FLIGHT):
        assert number(story, metric) == 0
    assert numbers(story, metrics.WORKERS) == {"ready": 1, "loading": 1}


def test_an_oldest_input_may_be_a_suspect() -> None:
    story = busy(max_batch_size=1)
    story.done("w0", 1)
    story.now += 1.0
    story.feed(lost("w0"))
    assert number(story, metrics.QUEUE_INPUTS) == 2
    assert number(story, metrics.QUEUE_OLDEST_SECONDS) == pytest.approx(1.0)


def test_what_frontends_tell_is_added_up_and_stays_when_they_are_gone() -> None:
    story = Story().with_frontend("f0").with_frontend("f1")
    cell = cell_of(metrics.REQUESTS, "embeddings", "200")
    seconds = buckets_of(metrics.REQUEST_SECONDS, "embeddings")
    for frontend, amount in ((b"f0", 3.0), (b"f1", 4.0), (b"f0", 1.0)):
        assert story.feed(e.FrontendTallied(frontend, [(cell, amount), (seconds.first, amount)])) == []
    assert numbers(story, metrics.REQUESTS) == {"embeddings 200": 8}
    assert numbers(story, metrics.REQUEST_SECONDS) == {"embeddings": 8}
    story.feed(e.FrontendLost(b"f0", "its process ended"))
    assert numbers(story, metrics.REQUESTS) == {"embeddings 200": 8}
    assert number(story, metrics.FRONTENDS) == 1


def test_a_stranger_is_asked_for_its_name_instead_of_being_counted() -> None:
    story = Story().with_frontend("f0")
    assert story.feed(e.FrontendTallied(b"f9", [(0, 1.0)])) == ["introduce -> f9"]
    assert report(story)[0] == 0


def test_both_refusals_of_one_reason_are_in_one_series() -> None:
    story = Story().with_frontend("f0")
    story.submit(1)
    story.feed(e.FrontendTallied(b"f0", [(cell_of(metrics.REJECTED, "loading"), 5.0)]))
    assert numbers(story, metrics.REJECTED) == {"loading": 6}


def test_malformed_messages_are_counted() -> None:
    story = Story()
    story.core.count_malformed()
    assert number(story, metrics.MALFORMED) == 1


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_no_counter_goes_back_and_gauges_agree_with_the_status(seed: int) -> None:
    dice = Random(seed)
    story = Story(max_batch_size=3, max_queue_delay=0.0, max_queue_size=9).with_frontend()
    gauges = {cell_of(each, *labels) for each in metrics.METRICS if each.kind == "gauge" for labels in each.series}
    before, workers = report(story), 0
    for rid in range(150):
        step = dice.randrange(8)
        if step < 4:
            story.submit(rid, [1] * dice.randrange(1, 5), ttl_s=dice.choice((0.05, 60.0)))
        elif step == 4 and story.open:
            worker = dice.choice(list(story.open))
            if story.open[worker]:
                story.done(worker, story.open[worker][0])
        elif step == 5:
            story.with_workers(f"w{workers}")
            workers += 1
        elif step == 6 and workers:
            story.feed(lost(f"w{dice.randrange(workers)}"))
        else:
            story.feed(e.RequestsCancelled(b"f0", [dice.randrange(rid + 1)]))
            story.wait(dice.choice((0.01, 0.3)))
        now, told = report(story), story.report()
        assert all(new >= old for cell, (old, new) in enumerate(zip(before, now, strict=True)) if cell not in gauges)
        assert number(story, metrics.QUEUE_INPUTS) == told.queue.inputs
        assert number(story, metrics.QUEUE_OLDEST_SECONDS) == pytest.approx(told.queue.oldest_wait_ms / 1000, abs=1e-5)
        assert numbers(story, metrics.WORKERS) == Counter(worker.state for worker in told.workers)
        before = now
    handed, answered = histogram(story, metrics.BATCH_INPUTS).value, number(story, metrics.INPUTS)
    assert handed >= answered == histogram(story, metrics.QUEUE_WAIT_SECONDS).counts[-1] > 0


def test_a_report_that_was_given_does_not_change_any_more() -> None:
    story = Story().with_frontend()
    before = report(story)
    story.submit(1)
    assert report(story) != before
    assert before[cell_of(metrics.REJECTED, "loading")] == 0


@pytest.mark.parametrize(
    "changes",
    [
        [],
        [[-1, 1.0]],
        [[FRONTEND_CELLS, 1.0]],
        [[1 << 62, 1.0]],
        [[0, -1.0]],
        [[0, float("nan")]],
        [[0, float("inf")]],
        [[0, 1e300]],
        [[0.5, 1.0]],
        [[True, 1.0]],
        [[0, "1"]],
        [[0]],
        [[0, 1.0, 2.0]],
        [[0, 1.0]] * (FRONTEND_CELLS + 1),
        {"0": 1.0},
        None,
    ],
)
def test_a_hostile_tally_is_no_message(changes: object) -> None:
    """What the doors would give the core is checked before: gauges and the broker's own counts cannot be told from outside."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode([changes]), type=m.Tally)


def test_the_largest_tally_and_the_report_fit_a_header() -> None:
    from packhorse_shared.codec import MAX_HEADER_BYTES, encode

    tally = m.Tally([(cell, 1e12 / 3) for cell in range(FRONTEND_CELLS)])
    largest = m.MetricsReport([1e17 / 3] * CELLS)
    assert max(len(encode(each)[1]) for each in (tally, largest)) < MAX_HEADER_BYTES / 10


def test_every_code_of_a_refusal_has_its_reason() -> None:
    """The broker refuses with these; a new one without a reason would count as other."""
    from packhorse_broker.measures import _REJECTED_BY_CODE

    served = {m.ErrorCode.FORWARD_FAILED, m.ErrorCode.NON_FINITE_OUTPUT, m.ErrorCode.OUT_OF_MEMORY}
    assert set(_REJECTED_BY_CODE) == set(m.ErrorCode) - served
