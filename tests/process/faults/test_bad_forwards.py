"""Forwards that go wrong in the real engine: the input that is to blame fails, or none does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from footprint import Settled
from harm import log_of, logged, ready_workers, wait_ready_workers
from load import Load
from questions import Question, ask, learn, random_questions
from report import Report
from stack import Stack

pytestmark = pytest.mark.process

SEED = 61
CLIENTS = 12
MOST_TOKENS = 100
"""What the model has memory for: a batch of six or so. The longest input has 64."""
BATCH_TIMEOUT_S = 3.0


@pytest.fixture(scope="module")
def stack(t_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    from trap_model import build_trap_model

    folder = tmp_path_factory.mktemp("traps")
    model = build_trap_model(t_model, folder / "model", most_tokens=MOST_TOKENS)
    stack = Stack(
        "--trust_remote_code",
        "--workers_per_device=2",
        f"--batch_timeout={BATCH_TIMEOUT_S:g}",
        model=model,
        environment={"HF_MODULES_CACHE": str(folder / "code")},
    )
    try:
        yield stack.start().wait_ready(2)
    finally:
        stack.clean()


@pytest.fixture(scope="module")
def questions(stack: Stack) -> list[Question]:
    return learn(stack.url, random_questions(SEED, 100))


def beside_load(stack: Stack, questions: list[Question], number: int, times: int) -> tuple[Report, Report]:
    """What became of requests with a trap in them, and of those that shared their batches."""
    from trap_model import trap

    with (
        Load(stack.port, questions, clients=CLIENTS, seed=SEED) as load,
        Load(stack.port, [ask([trap(number)])], clients=1, at_most=times) as guilty,
    ):
        load.wait_for(3 * CLIENTS)
        found = guilty.wait_done(within_s=60)
        wait_ready_workers(stack, 2, within_s=60)
        load.wait_for(3 * CLIENTS)
    print(f"seed {SEED}: {load.report()}")
    return found, load.report()


@pytest.mark.parametrize(
    ("trap_name", "answer"),
    [
        ("RAISES", (500, "forward_failed")),
        ("IS_NAN", (500, "non_finite_output")),
        ("TAKES_ALL_MEMORY", (503, "out_of_memory")),
    ],
)
def test_only_the_input_that_is_to_blame_fails(
    stack: Stack, questions: list[Question], settled: Settled, trap_name: str, answer: tuple[int, str]
) -> None:
    import trap_model

    pids = [worker["pid"] for worker in ready_workers(stack)]
    with settled(stack):
        found, others = beside_load(stack, questions, getattr(trap_model, trap_name), times=5)
    found.assert_invariant()
    assert [(each.status, each.code) for each in found.sent] == [answer] * 5
    others.assert_invariant()
    assert set(others.counts) == {200}
    assert [worker["pid"] for worker in ready_workers(stack)] == pids


def test_batches_above_the_memory_are_split(stack: Stack, questions: list[Question], settled: Settled) -> None:
    with settled(stack), Load(stack.port, questions, clients=4 * CLIENTS, seed=SEED, at_most=400) as load:
        report = load.wait_done()
    report.assert_invariant()
    assert dict(report.counts) == {200: 400}
    assert any("out of memory, going on in halves" in log_of(stack, f"worker-{slot}") for slot in (0, 1))


@pytest.mark.parametrize("trap_name", ["KILLS", "HANGS"])
def test_an_input_that_costs_workers(stack: Stack, questions: list[Question], settled: Settled, trap_name: str) -> None:
    import trap_model

    before = len(logged(stack, "worker lost|worker killed"))
    with settled(stack):
        found, others = beside_load(stack, questions, getattr(trap_model, trap_name), times=1)
    found.assert_invariant()
    assert dict(found.counts) == {500: 1}
    assert {each.code for each in found.sent} == {"worker_died"}
    assert len(logged(stack, "worker lost|worker killed")) - before == 3
    others.assert_invariant()
    # Two workers may both be dead at once: then who comes is told so. Three and more are never all gone (test_poison.py).
    assert set(others.counts) <= {200, 503}
    assert {each.code for each in others.sent if each.status == 503} <= {"no_worker", "loading"}
