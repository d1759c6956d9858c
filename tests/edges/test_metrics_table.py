"""The table of metrics, the numbering that follows from it, counting, and the text that a scraper gets."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from packhorse_frontend.metrics_page import render_metrics
from packhorse_shared import metrics
from packhorse_shared.meter import (
    CELLS,
    FRONTEND_CELLS,
    Meter,
    buckets_of,
    cell_of,
    cells_of,
    count_series,
    readings_of,
)

SPEC_NAMES = """packhorse_requests_total packhorse_inputs_total packhorse_tokens_total packhorse_truncated_inputs_total
packhorse_retries_total packhorse_rejected_total packhorse_queue_inputs packhorse_queue_wait_seconds packhorse_batch_inputs
packhorse_batch_tokens packhorse_batch_fill_ratio packhorse_tokenize_seconds packhorse_encode_seconds packhorse_request_seconds
packhorse_workers"""
OPENMETRICS = "application/openmetrics-text; version=1.0.0,text/plain;q=0.5"


def samples(body: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every line of the page, by name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


# ---- the table ----


def test_every_promised_metric_is_there_and_all_together_are_few() -> None:
    names = [metric.name for metric in metrics.METRICS]
    assert set(SPEC_NAMES.split()) <= set(names)
    assert len(set(names)) == len(names)
    assert count_series() < 300


@pytest.mark.parametrize("metric", metrics.METRICS, ids=lambda metric: metric.name)
def test_a_metric_is_named_and_described_as_prometheus_wants_it(metric: metrics.Metric) -> None:
    assert re.fullmatch(r"packhorse(_[a-z]+)+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert metric.help.endswith(".")
    assert "|" not in metric.help + metric.moves, "it would break the docs' table"
    assert bool(metric.bounds) == (metric.kind == "histogram")
    assert list(metric.bounds) == sorted(set(metric.bounds))
    assert len(set(metric.series)) == len(metric.series)
    assert all(len(values) == len(metric.labels) for values in metric.series)
    for unit in ("seconds", "bytes", "ratio"):
        assert metric.name.endswith(f"_{unit}") == (metric.unit == unit)


def test_cells_are_numbered_without_gaps_and_those_of_frontends_come_first() -> None:
    taken: list[int] = []
    for metric in metrics.METRICS:
        for values in metric.series:
            if metric.kind == "histogram":
                buckets = buckets_of(metric, *values)
                taken += [*range(buckets.first, buckets.first + len(metric.bounds) + 1), buckets.sum_cell]
            else:
                taken.append(cell_of(metric, *values))
        if metric is metrics.FRONTEND_METRICS[-1]:
            assert len(taken) == FRONTEND_CELLS
    assert taken == list(range(CELLS))


# ---- counting ----


def test_a_bucket_holds_what_is_at_its_bound_or_below() -> None:
    meter, buckets = Meter(), buckets_of(metrics.BATCH_FILL_RATIO)
    for value in (0.0, 0.1, 0.1001, 1.0, 7.0):
        meter.observe(buckets, value)
    meter.observe(buckets, 0.5, 3)
    (reading,) = readings_of(metrics.BATCH_FILL_RATIO, meter.values)
    assert reading.counts == (2, 3, 6, 6, 6, 7, 8)
    assert reading.value == pytest.approx(0.1 + 0.1001 + 1.0 + 7.0 + 1.5)


def test_changes_are_told_once_and_only_those_that_a_frontend_may_tell() -> None:
    meter = Meter()
    cell, foreign = cell_of(metrics.REQUESTS, "models", "200"), cell_of(metrics.INPUTS)
    assert meter.take_changes() == []
    meter.count(cell)
    meter.count(cell, 2)
    meter.count(foreign)
    assert meter.take_changes() == [(cell, 3.0)]
    assert meter.take_changes() == []
    meter.count(cell)
    assert meter.take_changes() == [(cell, 1.0)]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, FRONTEND_CELLS - 1), st.integers(1, 9)), max_size=60))
def test_whatever_is_counted_where_and_told_when_the_sum_is_right(steps: list[tuple[int, int, int]]) -> None:
    total, frontends, right = Meter(), [Meter(), Meter(), Meter()], Meter()
    for frontend, cell, amount in steps:
        frontends[frontend].count(cell, amount)
        right.count(cell, amount)
        if amount % 2:
            before = total.values.copy()
            total.add(frontends[frontend].take_changes())
            assert all(old <= new for old, new in zip(before, total.values, strict=True))
    for frontend_meter in frontends:
        total.add(frontend_meter.take_changes())
    assert total.values == right.values


def test_a_histogram_is_not_counted_like_a_number() -> None:
    with pytest.raises(AssertionError):
        cell_of(metrics.QUEUE_WAIT_SECONDS)
    with pytest.raises(AssertionError):
        buckets_of(metrics.INPUTS)
    with pytest.raises(ValueError, match="not in tuple"):
        cell_of(metrics.REQUESTS, "embeddings", "418")


# ---- the page ----


def test_the_page_is_parsed_back_to_what_was_counted() -> None:
    meter, dice = Meter(), random.Random(5)
    for metric in metrics.METRICS:
        for values in metric.series:
            if metric.kind == "histogram":
                for _ in range(9):
                    meter.observe(buckets_of(metric, *values), dice.choice((*metric.bounds, 1e6)) * dice.random())
            else:
                meter.count(cell_of(metric, *values), dice.randrange(1, 1 << 40))
    body, content_type = render_metrics(meter.values, "")
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    found = samples(body)
    assert len(found) == count_series()
    for metric in metrics.METRICS:
        for reading in readings_of(metric, meter.values):
            labels = tuple(sorted(zip(metric.labels, reading.labels, strict=True)))
            if metric.kind != "histogram":
                assert found.pop((metric.name, labels)) == reading.value
                continue
            assert found.pop((f"{metric.name}_sum", labels)) == pytest.approx(reading.value)
            assert found.pop((f"{metric.name}_count", labels)) == reading.counts[-1] == 9
            for bound, count in zip((*metric.bounds, float("inf")), reading.counts, strict=True):
                text = "+Inf" if bound == float("inf") else f"{bound!r}"
                assert found.pop((f"{metric.name}_bucket", tuple(sorted((*labels, ("le", text)))))) == count
    assert not found


def test_types_and_help_are_told() -> None:
    body, _ = render_metrics([0.0] * CELLS, "")
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}
    assert len(families) == len(metrics.METRICS)
    for metric in metrics.METRICS:
        family = families[metric.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (metric.kind, metric.help)


def test_openmetrics_where_it_is_asked_for() -> None:
    body, content_type = render_metrics([1.0] * CELLS, OPENMETRICS)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    families = list(openmetrics.text_string_to_metric_families(body.decode()))
    assert body.endswith(b"# EOF\n")
    assert sum(len(family.samples) for family in families) == count_series()
    assert {family.name: family.unit for family in families}["packhorse_queue_wait_seconds"] == "seconds"


@pytest.mark.parametrize(
    "accept", ["*/*", "text/html", "text/plain;version=x", "application/openmetrics-text;version=a.b", ";,;"]
)
def test_whatever_is_accepted_the_page_is_given(accept: str) -> None:
    body, content_type = render_metrics([0.0] * CELLS, accept)
    assert content_type.startswith("text/plain; version=0.0.4")
    assert len(samples(body)) == count_series()


@given(st.text(max_size=60), st.sampled_from(["text/plain;", "application/openmetrics-text;", "text/plain; escaping=", ""]))
def test_no_accept_header_breaks_the_page(text: str, before: str) -> None:
    body, content_type = render_metrics([0.0] * CELLS, before + text)
    assert body
    assert content_type.isprintable()


def test_cells_by_label() -> None:
    assert cells_of(metrics.WORKERS)["ready"] == cell_of(metrics.WORKERS, "ready")
