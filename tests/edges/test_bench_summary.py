"""From samples to figures, and from figures to what a reader is told."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest

from packhorse.bench.comparison import Ratio, compare
from packhorse.bench.options import Options
from packhorse.bench.plot import draw
from packhorse.bench.report import report_of_run, verdict
from packhorse.bench.samples import Samples
from packhorse.bench.summary import figures_of
from packhorse.bench.tables import better
from packhorse.bench.target import Target

OPTIONS = Options(urls=("http://a",), duration=10.0)
TARGET = Target("http://a", "tiny", 64)


def samples(took_ms: list[float], *, seconds: float = 10.0, late_ms: float = 0.0, inputs: int = 1) -> Samples:
    """A slice whose requests ended one after the other within it."""
    found = Samples(begun_at=100.0, stopped_at=100.0 + seconds)
    for index, each in enumerate(took_ms):
        found.ended.append(seconds * (index + 1) / (len(took_ms) + 1))
        found.took.append(each / 1000)
        found.late.append(late_ms / 1000)
        found.inputs.append(inputs)
        for values in found.server_ms.values():
            values.append(math.nan)
    found.begun = len(took_ms)
    found.tokens = 10 * inputs * len(took_ms)
    return found


def test_percentiles_and_rates() -> None:
    took_ms = [float(value) for value in range(1, 1001)]
    figures = figures_of([samples(took_ms[:500], late_ms=1.0, inputs=3), samples(took_ms[500:], late_ms=1.0, inputs=3)])
    assert figures.seconds == 20
    assert (figures.requests_per_s, figures.inputs_per_s, figures.tokens_per_s) == pytest.approx((50, 150, 1500), rel=1e-3)
    assert figures.latency_ms is not None
    found = (figures.latency_ms.mean, figures.latency_ms.p50, figures.latency_ms.p99, figures.latency_ms.max)
    assert found == pytest.approx((501.5, *(1 + np.percentile(took_ms, (50, 99))), 1001), rel=1e-5)
    assert figures.server_ms == {}


def test_what_is_open_at_the_end_counts_with_its_part_inside() -> None:
    """Two clients whose requests take 4 s each, for 10 s: 2 to 3 rounds of them end inside, the rate is 0.5/s all the same."""
    slice_ = samples([4000.0] * 6)
    for index, ended in enumerate((4, 4, 8, 8, 12, 12)):
        slice_.ended[index] = ended
    assert figures_of([slice_]).requests_per_s == pytest.approx(0.5, rel=1e-6)


def test_server_times_count_where_they_are_told() -> None:
    slice_ = samples([1.0, 2.0, 3.0])
    slice_.server_ms["queue"][1] = 5.0
    assert figures_of([slice_]).server_ms.keys() == {"queue"}
    assert figures_of([slice_]).server_ms["queue"].mean == 5.0


def test_nothing_answered_has_no_latency() -> None:
    figures = figures_of([samples([])])
    assert (figures.latency_ms, figures.tokens_per_s, figures.requests_per_s) == (None, None, 0)


def test_ratios_are_of_rounds_side_by_side() -> None:
    """The machine gets slower and slower, and A stays twice as fast."""
    ours = [figures_of([samples([2.0 * factor] * (400 // factor))]) for factor in (1, 2, 4)]
    theirs = [figures_of([samples([4.0 * factor] * (200 // factor))]) for factor in (1, 2, 4)]
    ratios = {ratio.figure: ratio for ratio in compare(ours, theirs)}
    assert ratios["requests/s"].median == pytest.approx(2)
    assert (ratios["latency p50"].lowest, ratios["latency p50"].highest) == pytest.approx((0.5, 0.5))
    assert {better(ratio) for ratio in ratios.values()} == {"A"}
    assert compare(ours, [figures_of([samples([])])]) == []


@pytest.mark.parametrize(
    ("lowest", "highest", "rounds", "is_better_high", "name"),
    [
        (1.1, 1.5, 5, True, "A"),
        (1.1, 1.5, 5, False, "B"),
        (0.5, 0.9, 5, True, "B"),
        (0.9, 1.1, 5, True, "not clear"),
        (1.005, 1.01, 5, True, "not clear"),
        (2, 2, 1, True, "not clear"),
    ],
)
def test_who_is_better_is_said_only_where_all_rounds_agree(
    lowest: float, highest: float, rounds: int, is_better_high: bool, name: str
) -> None:
    assert better(Ratio("x", is_better_high, (lowest + highest) / 2, lowest, highest, rounds)) == name


def notes_of(slice_: Samples, options: Options = OPTIONS) -> list[str]:
    return report_of_run(options, [(TARGET, [slice_])], 1, is_cut=False).notes


def test_the_reader_is_told_when_the_client_was_in_the_way() -> None:
    fine = samples([1.0] * 200)
    assert notes_of(fine) == []
    fine.cpu_share = 0.97
    assert notes_of(fine) == ["the client itself was the limit: it used 97% of its core"]
    lagging = samples([1.0] * 200)
    lagging.loop_lag.extend([0.02] * 100)
    assert notes_of(lagging) == ["the client itself was late by 20.0 ms (p99): its machine is busy, latencies look too high"]


def test_the_reader_is_told_when_an_open_loop_was_late() -> None:
    late = samples([1.0] * 200, late_ms=30.0)
    open_loop = msgspec.structs.replace(OPTIONS, rate=20.0)
    sent = "requests were sent late (p99 30.0 ms, at most 30.0 ms)"
    assert notes_of(late, open_loop) == [f"{sent}, because the client was busy; that is part of their latency"]
    late.waited_for_connection, late.never_sent = 150, 1
    waited, unsent = notes_of(late, open_loop)
    assert waited == f"{sent}, 150 of them because all 1000 connections were in use; that is part of their latency"
    assert unsent == "not sent although due: 1 request; the server falls behind, so that real latencies are higher"


def test_few_answers_and_abandoned_ones_are_told() -> None:
    few = samples([1.0] * 5)
    few.abandoned = 2
    assert notes_of(few) == ["2 open requests left without an answer", "only 5 answers: p95 and p99 say little"]


def test_the_reader_is_told_when_the_run_was_cut_short() -> None:
    cut = samples([1.0] * 200)
    cut.is_interrupted = True
    assert notes_of(cut) == [f"interrupted; the load lasted {cut.stopped_at - cut.begun_at:.1f} s"]


def test_the_verdict() -> None:
    def said(slice_: Samples) -> str | None:
        return verdict(report_of_run(OPTIONS, [(TARGET, [slice_])], 1, is_cut=False))

    slice_ = samples([1.0])
    slice_.fail("HTTP 500", "no luck", is_transport=False)
    slice_.refused = 3
    assert said(slice_) is None
    slice_.fail("connection lost", "Server disconnected", is_transport=True)
    assert said(slice_) == "http://a did not answer rightly: connection lost (1); for example Server disconnected"
    refused = samples([])
    refused.refused, refused.refusal = 4, "full"
    assert said(refused) == "http://a answered none of 4 requests: full"


def test_the_key_is_not_in_the_report() -> None:
    report = report_of_run(msgspec.structs.replace(OPTIONS, api_key="geheim"), [(TARGET, [samples([1.0])])], 1, is_cut=True)
    assert b"geheim" not in msgspec.json.encode(report)
    assert report.notes[0] == "of short only the first 64 MiB were used"


@pytest.mark.parametrize("took_ms", [[], [3.0], [1.0] * 500 + [400.0] * 3], ids=["nothing", "one", "a long tail"])
def test_the_picture_of_any_run(took_ms: list[float], tmp_path: Path) -> None:
    two = msgspec.structs.replace(OPTIONS, urls=("http://a", "http://b"), rounds=2, texts="$x^{.jsonl")
    measured = [(TARGET, [samples(took_ms), samples(took_ms)]), (TARGET, [samples(took_ms)])]
    draw(report_of_run(two, measured, 1, is_cut=False), measured, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
