"""Who waits for whom: single requests beside a huge one, urgent ones beside a flood, and the low class that still moves.

Waiting is counted in batches that the worker began meanwhile, which is the same on a busy machine; the times are aims.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

import pytest

from aims import Aims
from footprint import Settled
from load import Load
from questions import Question, ask, ids_of
from report import Report
from standin import Computed
from standin_stack import StandInFactory, StandInStack
from waiting import wait_until

pytestmark = pytest.mark.process

SEED = 97
BATCH = 32
BATCH_S = 0.05
SINGLES_PER_S = 20
SINGLES = 40
BATCHES_AIM = 3
"""The running batch, the one at hand, and its own."""
BATCHES_LIMIT = 10
"""On a machine where others take the processor from the frontend for as long as a batch runs."""
FLOOR = 16
"""Of so many batches one goes to the lower classes."""


@pytest.fixture(scope="module")
def stack(make_shared_standin: StandInFactory) -> StandInStack:
    stack = make_shared_standin(f"--max_batch_size={BATCH}", "--max_queue_size=20000", batch_s=BATCH_S)
    stack.start().wait_ready()
    return stack


def make_singles(priority: int) -> dict[Question, tuple[int, ...]]:
    """Requests of one input, each with ids of its own, by which it is found in what was computed."""
    texts = [f"t91 t{10 + number // 80} t{10 + number % 80}" for number in range(400)]
    return {ask([text], fields={"priority": priority}): tuple(ids_of(text)) for text in texts}


def make_bulk(priority: int, inputs: int = 2048, words: int = 2) -> Question:
    return ask([" ".join(["t92"] * words)] * inputs, is_base64=True, fields={"priority": priority})


def singles_beside(stack: StandInStack, questions: Sequence[Question], bulk: Question, clients: int) -> Report:
    """Singles from the moment at which so many clients have bulk in the queue, each the next when it has its answer."""
    batches = len(stack.computed())
    with Load(stack.port, [bulk], clients=clients) as flood:
        wait_until(lambda: stack.status()["queue"]["inputs"] > 1000, 10, "the flood")
        with Load(stack.port, questions, rate=SINGLES_PER_S, seed=SEED, at_most=SINGLES) as load:
            report = load.wait_done()
        assert stack.status()["queue"]["inputs"] > 100, "the flood ended before the singles did"
    print(f"singles: {report}\nflood: {flood.report()}; {len(stack.computed()) - batches} batches")
    for each in (report, flood.report()):
        each.assert_invariant()
        assert set(each.counts) == {200}
    return report


def check(stack: StandInStack, own_ids: dict[Question, tuple[int, ...]], report: Report, aims: Aims, what: str) -> None:
    batches = stack.computed()
    waited = batches_waited(batches, [(own_ids[each.question], each.sent) for each in report.sent])
    print(f"batches waited: {sorted(waited)}")
    assert sorted(waited)[int(0.9 * len(waited))] <= BATCHES_LIMIT
    first, last = report.sent[0].sent, report.sent[-1].sent
    batch_s = median(later.began - earlier.began for earlier, later in pairwise(batches) if first < earlier.began < last)
    aims.note(f"{what}, 99th percentile", report.percentile_s(99) / batch_s, "batch times", at_most=BATCHES_AIM)


def batches_waited(batches: Sequence[Computed], asked: Sequence[tuple[tuple[int, ...], float]]) -> list[int]:
    """How many batches the worker began after each request was sent, up to the one that held it."""
    began = [batch.began for batch in batches]
    held = [set(map(tuple, batch.ids)) for batch in batches]
    return [1 + next(number for number, ids in enumerate(held[bisect(began, sent) :]) if own in ids) for own, sent in asked]


@pytest.mark.parametrize("words", [1, 30])
def test_singles_beside_a_huge_request(stack: StandInStack, settled: Settled, aims: Aims, words: int) -> None:
    singles = make_singles(0)
    with settled(stack):
        report = singles_beside(stack, list(singles), make_bulk(0, words=words), clients=1)
    check(stack, singles, report, aims, f"singles beside 2048 inputs of {words} words")


def test_urgent_singles_beside_a_flood(stack: StandInStack, settled: Settled, aims: Aims) -> None:
    singles = make_singles(-1)
    with settled(stack):
        report = singles_beside(stack, list(singles), make_bulk(5, 512), clients=4)
    check(stack, singles, report, aims, "singles of priority -1 beside a flood of priority 5")


def test_the_low_class_moves_at_its_floor(stack: StandInStack, settled: Settled) -> None:
    """While urgent work is never short, one batch in sixteen is led by the low class, and no more."""
    low = ask(["t93 t10"] * (2 * BATCH), fields={"priority": 5})
    with settled(stack):
        with Load(stack.port, [make_bulk(-1, 512)], clients=4) as flood:
            wait_until(lambda: stack.status()["queue"]["inputs"] > 1000, 10, "the flood")
            before = len(stack.computed())
            with Load(stack.port, [low], clients=1, at_most=1) as load:
                report = load.wait_done()
            batches = [count_low(batch) for batch in stack.computed()[before:]]
        flood.report().assert_invariant()
    report.assert_invariant()
    assert set(report.counts) == {200}
    led = [number for number, inputs in enumerate(batches) if inputs]
    print(f"low inputs by batch: {batches}")
    assert sum(batches) == 2 * BATCH
    assert all(FLOOR - 1 <= later - earlier <= FLOOR + 1 for earlier, later in pairwise(led))
    assert led[0] <= FLOOR + 4


def count_low(batch: Computed) -> int:
    return batch.ids.count(ids_of("t93 t10"))
