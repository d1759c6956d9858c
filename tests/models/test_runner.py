"""Inputs are run in groups within the budget; failing forwards are halved down to the guilty input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model_facts import model_facts
from packhorse_shared.messages import ErrorCode, WorkerLimits
from packhorse_worker.backend import DeviceLostError
from packhorse_worker.engine.batch import Input
from packhorse_worker.engine.budget import TokenBudget
from packhorse_worker.engine.grouping import PackedGrouping, PaddedGrouping
from packhorse_worker.engine.lanes.lane import DirectLane, How
from packhorse_worker.engine.outcome import Outcome
from packhorse_worker.engine.runner import Runner

Inputs = Sequence[Input]
PADDED = PaddedGrouping(2048, 4, 0.15)


class FakePipeline:
    """Gives each input's sum as its vector, unless ``trouble`` raises for the inputs of a forward."""

    device = torch.device("cpu")
    is_packed = False
    is_per_token = False

    def __init__(self, trouble: Callable[[Inputs], None]) -> None:
        self.groups: list[list[int]] = []
        self._trouble = trouble

    @property
    def areas(self) -> list[int]:
        """Padded area of each forward."""
        return [len(group) * max(group) for group in self.groups]

    def gives_tokens(self, *, per_token: bool) -> bool:
        return per_token

    def forward(self, inputs: Inputs, *, per_token: bool = False, constants: Any = None) -> torch.Tensor:
        self.groups.append([len(each) for each in inputs])
        self._trouble(inputs)
        if per_token:
            return torch.cat([torch.from_numpy(each.ids).float()[:, None] for each in inputs])
        return torch.tensor([[float(each.ids.sum()), 1.0] for each in inputs])


def runner_with(
    trouble: Callable[[Inputs], None], max_num_tokens: int = 64, grouping: PackedGrouping | PaddedGrouping = PADDED
) -> tuple[Runner, FakePipeline]:
    facts = model_facts(max_seq_len=50)
    pipeline = FakePipeline(trouble)
    stand_in: Any = pipeline
    return Runner(stand_in, DirectLane(stand_in), facts, WorkerLimits(32, max_num_tokens), grouping), pipeline


def inputs(*rows: list[int]) -> list[Input]:
    return [Input(np.array(row, dtype=np.int32)) for row in rows]


def run(runner: Runner, batch: Inputs) -> tuple[Outcome, list[tuple[int, ErrorCode]]]:
    outcome = runner.run(batch)
    return outcome, [(failure.index, failure.code) for failure in outcome.failures]


def first_values(outcome: Outcome) -> list[float | None]:
    return [None if row is None else float(row[0]) for row in outcome.rows]


def nothing(_ids: Inputs) -> None:
    """No trouble."""


def raise_on(token: int, error: Exception) -> Callable[[Inputs], None]:
    def trouble(ids: Inputs) -> None:
        if any(token in each.ids for each in ids):
            raise error

    return trouble


def test_the_guilty_inputs_fail_alone() -> None:
    runner, _ = runner_with(raise_on(99, ValueError("about the input's text")))
    outcome, failures = run(runner, inputs([1], [99], [2, 3], [4], [5], [6], [99, 1], [7]))
    assert failures == [(1, ErrorCode.FORWARD_FAILED), (6, ErrorCode.FORWARD_FAILED)]
    assert first_values(outcome) == [1, None, 5, 4, 5, 6, None, 7]
    batch = outcome.encoded_batch()
    assert batch.row_values == [2, 0, 2, 2, 2, 2, 0, 2]
    assert batch.values.tolist() == [1, 1, 5, 1, 4, 1, 5, 1, 6, 1, 7, 1]
    assert "text" not in outcome.failures[0].message


def test_padded_areas_stay_within_the_budget_and_rows_keep_their_order() -> None:
    runner, pipeline = runner_with(nothing)
    lengths = [1, 40, 3, 20, 20, 2, 50, 7, 1, 33]
    outcome, failures = run(runner, inputs(*[[1] * length for length in lengths]))
    assert failures == []
    assert first_values(outcome) == lengths
    assert max(pipeline.areas) <= 64
    assert sum(pipeline.areas) < 1.5 * sum(lengths)


def test_an_input_over_the_budget_runs_alone() -> None:
    runner, pipeline = runner_with(nothing, max_num_tokens=8)
    outcome, failures = run(runner, inputs([1] * 20, [2], [3]))
    assert (failures, first_values(outcome)) == ([], [20, 2, 3])
    assert pipeline.areas == [20, 2]


@pytest.mark.parametrize("row", [[128], [-1], []])
def test_ids_outside_the_table_never_reach_the_device(row: list[int]) -> None:
    runner, pipeline = runner_with(nothing)
    outcome, failures = run(runner, inputs([1], row))
    assert failures == [(1, ErrorCode.FORWARD_FAILED)]
    assert first_values(outcome) == [1, None]
    assert pipeline.areas == [1]


def test_an_input_over_the_limit_fails_alone() -> None:
    runner, _ = runner_with(nothing)
    outcome, failures = run(runner, inputs([1] * 51, [1] * 50))
    assert failures == [(0, ErrorCode.INPUT_TOO_LONG)]
    assert "51" in outcome.failures[0].message
    assert "50" in outcome.failures[0].message


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
    ],
)
def test_out_of_memory_is_halved_and_only_what_never_fits_fails(error: Exception) -> None:
    def trouble(ids: Inputs) -> None:
        if len(ids) * max(len(each) for each in ids) > 16:
            raise error

    runner, pipeline = runner_with(trouble)
    outcome, failures = run(runner, inputs([1] * 20, *[[1] * 8] * 8, [1]))
    assert failures == [(0, ErrorCode.OUT_OF_MEMORY)]
    assert first_values(outcome) == [None, *[8] * 8, 1]
    pipeline.groups.clear()
    run(runner, inputs(*[[1] * 8] * 8))
    assert max(pipeline.areas) <= 32, "the budget stays small for a while"


def test_the_budget_comes_back() -> None:
    budget = TokenBudget(1000)
    budget.shrink(600)
    assert budget.tokens == 300
    budget.shrink(2)
    assert budget.tokens == 1
    for _ in range(64 * 10):
        budget.succeeded()
    assert budget.tokens == 1000


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
    ],
)
def test_a_sticky_error_ends_the_worker(error: Exception) -> None:
    runner, _ = runner_with(raise_on(99, error))
    with pytest.raises(DeviceLostError, match="CUDA error"):
        runner.run(inputs([1], [99]))


def test_a_batch_without_any_row() -> None:
    runner, _ = runner_with(raise_on(1, ValueError("no")))
    outcome, failures = run(runner, inputs([1], [1]))
    assert len(failures) == 2
    batch = outcome.encoded_batch()
    assert batch.values.tolist() == []
    assert batch.row_values == [0, 0]


def test_progress_is_told_of_every_input_once() -> None:
    runner, _ = runner_with(raise_on(99, ValueError()))
    told: list[int] = []
    runner.run(inputs([1], [99], *[[2] * 30] * 5, [128]), progress=told.append)
    assert sum(told) == 7, "all but the one that never ran"
    assert len(told) > 1


def test_token_outputs_are_split_by_length() -> None:
    runner, _ = runner_with(nothing)
    outcome = runner.run(inputs([1, 2, 3], [4], [5, 6]), How(per_token=True))
    assert [row.tolist() for row in outcome.rows if row is not None] == [[[1], [2], [3]], [[4]], [[5], [6]]]


def test_packed_forwards_are_of_like_size_and_within_the_limits() -> None:
    runner, pipeline = runner_with(nothing, max_num_tokens=1000, grouping=PackedGrouping(100))
    lengths = [50, 50, 49, 48, 47, 30, 20, 10, 4, 4, 3]
    outcome, failures = run(runner, inputs(*[[1] * length for length in lengths]))
    assert (failures, first_values(outcome)) == ([], lengths)
    sizes = [sum(group) for group in pipeline.groups]
    assert max(sizes) <= 100
    assert len(sizes) == 4, "no more forwards than the tokens need"


@given(st.lists(st.integers(1, 400), min_size=1, max_size=64), st.integers(1, 500), st.integers(1, 2000))
def test_a_packed_forward_holds_the_budget_or_a_single_input(lengths: list[int], most: int, budget: int) -> None:
    lengths.sort(reverse=True)
    grouping = PackedGrouping(most)
    done = 0
    while done < len(lengths):
        count = grouping.cut(lengths[done:], budget)
        assert count >= 1
        assert count == 1 or sum(lengths[done : done + count]) <= min(most, budget)
        done += count
