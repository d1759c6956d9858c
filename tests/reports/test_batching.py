"""What shares a forward, and who waits for whom: long inputs beside short ones, one huge request beside small ones."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from statistics import median

import msgspec
import pytest

from aims import Aims
from load import Load
from models.test_runner import inputs, runner_with
from packhorse_worker.engine.grouping import PackedGrouping, PaddedGrouping, grouping_of
from questions import ask, learn
from stack import Stack
from standin_stack import StandInFactory
from waiting import wait_until

BUDGET = 4096
LONG, SHORT, SHORT_ONES = 1500, 10, 31
BULK = 2000
BULK_TAKES_S = 20.0
BATCH = 32


def padded_area(lengths: Sequence[int]) -> int:
    return len(lengths) * max(lengths)


@pytest.mark.parametrize("place", [0, 15, 31])
@pytest.mark.parametrize("is_packed", [True, False])
def test_one_long_input_does_not_pad_the_short_ones(place: int, *, is_packed: bool) -> None:
    """One long text pads its whole batch to its length, until memory runs out."""
    lengths = [SHORT] * SHORT_ONES
    lengths.insert(place, LONG)
    grouping: PackedGrouping | PaddedGrouping = grouping_of("cpu", is_packed=is_packed, pads=True)
    runner, pipeline = runner_with(lambda _: None, max_num_tokens=BUDGET, grouping=grouping)
    runner.facts = msgspec.structs.replace(runner.facts, max_seq_len=2 * LONG)
    outcome = runner.run(inputs(*[[1] * length for length in lengths]))
    assert [None if row is None else float(row[0]) for row in outcome.rows] == lengths
    size = sum if is_packed else padded_area
    assert all(size(group) <= BUDGET for group in pipeline.groups)
    assert max(group.count(SHORT) for group in pipeline.groups) >= SHORT_ONES - 1
    assert sum(map(size, pipeline.groups)) <= sum(lengths) + LONG, "hardly more is computed than was asked for"


@pytest.fixture
def slow(request: pytest.FixtureRequest, make_standin: StandInFactory, soak: bool) -> Iterator[Stack]:
    """A server that the bulk keeps busy: a stand-in for five seconds, at full length a model as large as BERT for twenty."""
    if not soak:
        yield make_standin(batch_s=BULK_TAKES_S / 4 / (BULK / BATCH), logs_ids=False).start().wait_ready()
        return
    stack = Stack(model=request.getfixturevalue("slow_model"))
    try:
        yield stack.start().wait_ready()
    finally:
        stack.clean()


@pytest.mark.process
@pytest.mark.timeout(400)
def test_a_small_request_does_not_wait_for_a_huge_one(slow: Stack, soak: bool, aims: Aims) -> None:
    """One client's thousands of texts run to their end before anybody else's single text begins."""
    singles, bulk = ask(["t20 t21"]), ask([f"t{10 + number % 100} t{10 + number // 100}" for number in range(BULK)])
    if soak:
        (singles,) = learn(slow.url, [singles])
        (bulk,) = learn(slow.url, [bulk])
    before = batches(slow)
    with Load(slow.port, [bulk], clients=1, at_most=1, patience_s=300) as flood:
        wait_until(lambda: slow.status()["queue"]["inputs"] > BULK / 2, 20, "the bulk")
        with Load(slow.port, [singles], rate=2 if soak else 8, is_even=True) as load:
            wait_until(lambda: slow.status()["queue"]["inputs"] < BATCH or flood.is_done, 300, "the bulk's end")
        beside = load.report().within(0, time.monotonic())
        huge = flood.wait_done(within_s=300)
    for each in (beside, huge):
        each.assert_invariant(300)
        assert set(each.counts) == {200}, "in order, and with the vectors of its own inputs"
    assert len(beside.sent) >= 10
    batch_s = huge.slowest_s / (batches(slow) - before)
    aims.note("singles beside a huge request, 95th percentile", beside.percentile_s(95) / batch_s, "batch times", at_most=5)
    assert median(each.seconds for each in beside.sent) < huge.slowest_s / 4


def batches(stack: Stack) -> int:
    return sum(int(worker["batches"]) for worker in stack.workers("ready", "busy"))
