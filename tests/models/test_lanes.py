"""Forwards that overlap give what they give alone, whatever the device has done yet, in whichever order outputs are fetched."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse_shared.extra_inputs import EncodeExtraInputSpec
from packhorse_shared.graph_config import EncodeCudaGraphConfig
from packhorse_worker.engine.batch import Extra, Input
from packhorse_worker.engine.graphs.buckets import Buckets
from packhorse_worker.engine.graphs.graphs import Graphs
from packhorse_worker.engine.lanes.lane import FLIGHTS, DirectLane, Flight, How, QueuedLane
from packhorse_worker.engine.lanes.staging import Plan
from packhorse_worker.engine.pipeline import Pipeline
from packhorse_worker.engine.runner import Runner
from recorded_graphs import NEAR, maker_of
from reference import runner_of
from simulated_device import SimulatedQueues, TapeRecorder
from tiny_families import build_family
from tiny_heads import build_head
from tiny_models import HIDDEN, ROWS, build_l, build_t, build_x

PADDED = EncodeCudaGraphConfig(batch_sizes=[1, 2, 4], num_tokens=[4, 16, 40], seq_lens=[4, 16], enable_padding=True)
EXACT = EncodeCudaGraphConfig(batch_sizes=[1, 2, 3], num_tokens=[2, 5, 6, 9], seq_lens=[2, 3, 5])
GRAPHS = {"without graphs": None, "padded graphs": PADDED, "exact graphs": EXACT}
MODELS: dict[str, Callable[[Path], Path]] = {
    "bert": lambda folder: build_t(folder, pooling=("mean", "cls", "max", "weightedmean", "lasttoken")),
    "decoder": build_l,
    "roberta": build_x,
    "windowed": lambda folder: build_family(folder, "mistral"),
    "sequence classifier": lambda folder: build_head(folder, "modernbert-classifier-mean"),
    "token classifier": lambda folder: build_head(folder, "bert-token-reward"),
    "padded": lambda folder: build_family(folder, "mpnet"),
}
Batch = Sequence[Input]


@dataclass(frozen=True)
class Asked:
    batch: Batch
    how: How


@pytest.fixture(scope="module", params=MODELS)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return runner_of(MODELS[request.param](tmp_path_factory.mktemp("lanes") / "model"))


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return runner_of(MODELS["bert"](tmp_path_factory.mktemp("lanes") / "bert"))


def graphs_of(
    runner: Runner, config: EncodeCudaGraphConfig | None, queues: SimulatedQueues
) -> tuple[Graphs | None, TapeRecorder | None]:
    """Graphs of a model, recorded on a simulated device."""
    if config is None or not runner.pipeline.is_packed:
        return None, None
    made = maker_of(runner, specs=config.extra_model_inputs, queues=queues)
    return made.maker.make(Buckets.of(config, 8, 64, 20)), made.recorder


_RECORDED: dict[tuple[int, EncodeCudaGraphConfig | None], tuple[Runner, Graphs | None]] = {}
"""Recording takes a hundred times as long as a flight, so lanes share their graphs."""


def lane_of(runner: Runner, queues: SimulatedQueues, config: EncodeCudaGraphConfig | None = None) -> QueuedLane:
    key = (id(runner), config)
    if key not in _RECORDED:
        _RECORDED[key] = runner, graphs_of(runner, config, SimulatedQueues())[0]
    return QueuedLane(runner.pipeline, queues, _RECORDED[key][1])


def random_batch(random: np.random.Generator, extras: Sequence[str] = ()) -> list[Input]:
    found = []
    for _ in range(int(random.integers(1, 6))):
        length = int(random.integers(1, 15))
        ids = random.integers(0, ROWS, length).astype(np.int32)
        found.append(Input(ids, int(random.integers(0, length + 1)), {name: _EXTRAS[name](random, length) for name in extras}))
    return found


_EXTRAS: dict[str, Callable[[np.random.Generator, int], Extra]] = {
    "token_type_ids": lambda random, length: Extra.of_tokens(torch.from_numpy(random.integers(0, 2, length))),
    "inputs_embeds": lambda random, length: Extra.of_tokens(
        torch.from_numpy(random.normal(size=(length, HIDDEN)).astype(np.float32))
    ),
}


def random_asked(random: np.random.Generator, pipeline: Pipeline) -> Asked:
    extras = []
    if pipeline.token_types > 1 and random.random() < 0.3:
        extras.append("token_type_ids")
    if pipeline.takes("inputs_embeds") and random.random() < 0.15:
        extras.append("inputs_embeds")
    constants = {"output_attentions": False} if pipeline.takes("output_attentions") and random.random() < 0.1 else None
    how = How(per_token=random.random() < 0.2, constants=constants, to_host=random.random() > 0.15)
    return Asked(random_batch(random, extras), how)


def expected_of(pipeline: Pipeline, asked: Asked) -> torch.Tensor:
    return DirectLane(pipeline).launch(asked.batch, asked.how).land().clone()


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    assert bool(torch.isfinite(expected).all())
    torch.testing.assert_close(found, expected, rtol=NEAR, atol=NEAR)


def run_story(lane: QueuedLane, pipeline: Pipeline, seed: int, flights: int = 7) -> None:
    """Launch random batches; land them early, late, in any order, twice, or in another thread."""
    random = np.random.default_rng(seed)
    queues = lane.queues
    assert isinstance(queues, SimulatedQueues)
    asked = [random_asked(random, pipeline) for _ in range(flights)]
    expected = [expected_of(pipeline, each) for each in asked]
    under_way: list[tuple[int, Flight]] = []
    landed: list[tuple[int, torch.Tensor]] = []
    for index, each in enumerate(asked):
        under_way.append((index, lane.launch(each.batch, each.how)))
        while under_way and random.random() < 0.45:
            number, flight = under_way.pop(int(random.integers(len(under_way))))
            outputs = _landed(flight, in_thread=random.random() < 0.2)
            check(outputs, expected[number])
            landed.append((number, outputs))
            if random.random() < 0.2:
                assert flight.land() is outputs
    for number, flight in under_way:
        landed.append((number, _landed(flight, in_thread=False)))
    queues.scribble()
    for number, outputs in landed:
        check(outputs, expected[number])  # still: they share no memory with the slots


def _landed(flight: Flight, *, in_thread: bool) -> torch.Tensor:
    found: list[torch.Tensor] = []
    if not in_thread:
        return flight.land()
    thread = threading.Thread(target=lambda: found.append(flight.land()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("graphs", GRAPHS)
def test_flights_give_what_a_forward_alone_gives(runner: Runner, graphs: str) -> None:
    """A wait left out, memory used again while it is read, an output that another forward overwrites."""
    for seed in range(10):
        run_story(lane_of(runner, SimulatedQueues(seed), GRAPHS[graphs]), runner.pipeline, seed)


@settings(max_examples=25)
@given(seed=st.integers(0, 1 << 30), graphs=st.sampled_from(list(GRAPHS)), flights=st.integers(1, 12))
def test_any_story(bert: Runner, seed: int, graphs: str, flights: int) -> None:
    run_story(lane_of(bert, SimulatedQueues(seed), GRAPHS[graphs]), bert.pipeline, seed, flights)


@pytest.mark.parametrize("graphs", ["without graphs", "padded graphs"])
def test_memory_left_over_by_larger_batches_does_not_matter(runner: Runner, graphs: str) -> None:
    for seed in range(5):
        queues = SimulatedQueues(seed)
        lane = lane_of(runner, queues, GRAPHS[graphs])
        random = np.random.default_rng(seed)
        for _ in range(6):
            asked = Asked(random_batch(random), How())
            check(lane.launch(asked.batch, asked.how).land(), expected_of(runner.pipeline, asked))
            queues.scribble()


def test_graphs_are_used_where_they_fit_and_nowhere_else(bert: Runner) -> None:
    queues = SimulatedQueues(1)
    graphs, recorder = graphs_of(bert, PADDED, queues)
    assert recorder is not None
    lane = QueuedLane(bert.pipeline, queues, graphs)

    def replays(batch: Batch, how: How = How()) -> int:  # noqa: B008
        before = sum(tape.replays for tape in recorder.tapes)
        check(lane.launch(batch, how).land(), expected_of(bert.pipeline, Asked(batch, how)))
        return sum(tape.replays for tape in recorder.tapes) - before

    inputs = [Input(np.arange(10, 10 + length, dtype=np.int32)) for length in (5, 3, 1)]
    assert replays(inputs) == 1
    assert replays(inputs[:1]) == 1
    assert replays(inputs, How(per_token=True)) == 0, "hidden states are in no graph"
    assert replays(inputs, How(constants={"output_attentions": False})) == 0
    assert replays([*inputs, *inputs]) == 0, "more inputs than any graph has"
    assert replays([Input(np.arange(20, dtype=np.int32))]) == 0, "longer than any graph's inputs"
    types = {"token_type_ids": Extra.of_tokens(torch.ones(4, dtype=torch.int64))}
    assert replays([Input(np.arange(4, dtype=np.int32), extras=types)]) == 1, "types are among the arrays anyway"
    embeds = {"inputs_embeds": Extra.of_tokens(torch.rand(4, HIDDEN))}
    assert replays([Input(np.arange(4, dtype=np.int32), extras=embeds)]) == 0, "not declared"


def test_declared_tensors_are_read_by_graphs(bert: Runner) -> None:
    """The embeddings of the batch before, or of a dummy."""
    config = EncodeCudaGraphConfig(
        batch_sizes=[1, 2, 4],
        num_tokens=[8, 24],
        seq_lens=[8, 16],
        enable_padding=True,
        extra_model_inputs=[EncodeExtraInputSpec(name="inputs_embeds", shape=("num_tokens", HIDDEN), dtype="float32")],
    )
    for seed in range(6):
        queues = SimulatedQueues(seed)
        graphs, recorder = graphs_of(bert, config, queues)
        assert recorder is not None
        assert graphs is not None
        lane = QueuedLane(bert.pipeline, queues, graphs)
        random = np.random.default_rng(seed)
        for _ in range(4):
            names = ["inputs_embeds", "token_type_ids"][: int(random.integers(1, 3))]
            batch = [each for each in random_batch(random, names) if len(each) <= 6][:4] or random_batch(random, names)[:1]
            check(lane.launch(batch, How()).land(), expected_of(bert.pipeline, Asked(batch, How())))
            queues.scribble()
        assert sum(tape.replays for tape in recorder.tapes) > len(recorder.tapes)


def test_outputs_for_the_device_are_ready_and_no_part_of_a_slot(bert: Runner) -> None:
    for seed in range(8):
        queues = SimulatedQueues(seed)
        lane = lane_of(bert, queues, PADDED)
        asked = [Asked(random_batch(np.random.default_rng(seed + number)), How(to_host=False)) for number in range(5)]
        landed = [lane.launch(each.batch, each.how).land() for each in asked]
        queues.scribble()
        for outputs, each in zip(landed, asked, strict=True):
            check(outputs, expected_of(bert.pipeline, each))


class Borrowing:
    """Stands in for a pipeline; its outputs are made of what the caller lent."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipeline, name)

    def compute(self, _tensors: Any, _layout: Any, shape: Any, lent: Any, *, per_token: bool) -> torch.Tensor:
        assert not per_token
        return torch.full((shape.batch_size, self.width(per_token=False)), float(lent["lent"].sum()))


def test_what_the_caller_lends_is_read_before_it_is_given_back(bert: Runner) -> None:
    for seed in range(8):
        stand_in: Any = Borrowing(bert.pipeline)
        lane = QueuedLane(stand_in, SimulatedQueues(seed))
        lent = torch.ones(3)
        flight = lane.launch(random_batch(np.random.default_rng(seed)), How(constants={"lent": lent}))
        lent.fill_(5)
        assert float(flight.land()[0, 0]) == 3


def points_of(runner: Runner, config: EncodeCudaGraphConfig | None) -> list[str]:
    """What the lane asks the device for in one flight that grows its slot."""
    queues = SimulatedQueues(0, at_once=True)
    lane = lane_of(runner, queues, config)
    del queues.points[:]
    lane.launch([Input(np.arange(5, dtype=np.int32))], How()).land()
    return [point for point in queues.points if not point.startswith("wait")]


class BrokenError(Exception):
    """Planted."""


@pytest.mark.parametrize("graphs", ["without graphs", "padded graphs"])
def test_an_error_at_any_point_leaves_the_lane_as_it_was(bert: Runner, graphs: str) -> None:
    """The next flights are launched into memory that the failed one still uses, or wait for ever."""
    config = GRAPHS[graphs]
    points = points_of(bert, config)
    assert {"on host", "on device", "copy up", "after compute", "run compute", "after down", "copy down"} <= set(points)
    for broken in range(len(points)):
        for seed in range(3):
            queues = SimulatedQueues(seed)
            lane = lane_of(bert, queues, config)
            random = np.random.default_rng(seed)
            first = [Asked(random_batch(random), How()) for _ in range(seed % 3)]
            flights = [lane.launch(each.batch, each.how) for each in first]
            queues.breaks = _break_at(broken)
            with suppress(BrokenError):  # of a slot that has grown there are fewer points
                lane.launch(random_batch(random), How()).land()
            queues.breaks = None
            for flight, each in zip(flights, first, strict=True):
                check(flight.land(), expected_of(bert.pipeline, each))
            run_story(lane, bert.pipeline, seed, flights=2 * FLIGHTS + 1)


def _break_at(number: int) -> Callable[[str], None]:
    count = iter(range(1 << 20))

    def meet(point: str) -> None:
        if not point.startswith("wait") and next(count) == number:
            raise BrokenError

    return meet


def test_a_failed_launch_waits_for_what_it_had_begun(bert: Runner) -> None:
    queues = SimulatedQueues(3)
    lane = lane_of(bert, queues)
    for point in ("after compute", "run compute", "after down", "copy down", "mark down"):
        queues.breaks = _break_on(point)
        with pytest.raises(BrokenError):
            lane.launch([Input(np.arange(5, dtype=np.int32))], How())
        queues.breaks = None
        assert queues.is_idle, point


def _break_on(point: str) -> Callable[[str], None]:
    waiting = [point]

    def meet(met: str) -> None:
        if met in waiting:
            waiting.remove(met)
            raise BrokenError

    return meet


def test_a_forward_that_raises_raises_in_the_launch(bert: Runner) -> None:
    queues = SimulatedQueues(0, at_once=True)
    lane = lane_of(bert, queues)
    good = [Input(np.array([10, 11], dtype=np.int32))]
    before = lane.launch(good, How())
    for _ in range(2 * FLIGHTS):
        with pytest.raises(IndexError):
            lane.launch([Input(np.array([ROWS + 1], dtype=np.int32))], How())
        check(lane.launch(good, How()).land(), expected_of(bert.pipeline, Asked(good, How())))
    check(before.land(), expected_of(bert.pipeline, Asked(good, How())))


def test_what_the_device_runs_into_later_is_told_to_all_under_way(bert: Runner) -> None:
    """A sticky error: raised where outputs are waited for, by every thread and every time."""
    queues = SimulatedQueues(0)
    queues.pace, queues.is_lazy = 0.0, True
    lane = lane_of(bert, queues)
    bad = lane.launch([Input(np.array([ROWS + 1], dtype=np.int32))], How())
    good = lane.launch([Input(np.array([10], dtype=np.int32))], How())
    for flight in (bad, bad, good):
        with pytest.raises(IndexError):
            flight.land()


class Interrupted(BaseException):
    """As KeyboardInterrupt."""


def test_an_interrupted_wait_can_be_taken_up_again(bert: Runner) -> None:
    for seed in range(6):
        queues = SimulatedQueues(seed)
        lane = lane_of(bert, queues)
        asked = [Asked(random_batch(np.random.default_rng(seed + number)), How()) for number in range(FLIGHTS + 1)]
        flights = [lane.launch(each.batch, each.how) for each in asked[:FLIGHTS]]

        def interrupt(point: str) -> None:
            if point.startswith("wait"):
                raise Interrupted

        queues.breaks = interrupt
        with pytest.raises(Interrupted):
            flights[0].land()
        with pytest.raises(Interrupted):
            lane.launch(asked[-1].batch, asked[-1].how)
        queues.breaks = None
        lane.launch(asked[-1].batch, asked[-1].how)
        lane.launch(asked[-1].batch, asked[-1].how)
        for flight, each in zip(flights, asked, strict=False):
            check(flight.land(), expected_of(bert.pipeline, each))


def test_no_more_than_two_flights_are_under_way(bert: Runner) -> None:
    queues = SimulatedQueues(0)
    queues.pace, queues.is_lazy = 0.0, True
    lane = lane_of(bert, queues)
    for number in range(6):
        lane.launch([Input(np.array([10], dtype=np.int32))], How())
        waits = [point for point in queues.points if point.startswith("wait")]
        assert len(waits) == max(0, number + 1 - FLIGHTS), "one wait for each flight, and only for the one before the last"


@pytest.mark.parametrize("graphs", ["without graphs", "padded graphs"])
def test_nothing_is_allocated_after_one_large_batch(bert: Runner, graphs: str) -> None:
    """Memory for the second flight only, when requests are waiting."""
    queues = SimulatedQueues(0)
    lane = lane_of(bert, queues)
    large = [Input(np.arange(20, dtype=np.int32))] * 200
    lane.launch(large, How()).land()
    found, _ = graphs_of(bert, GRAPHS[graphs], SimulatedQueues())
    if found is not None:
        lane.use(found)
    before = len(queues.blocks)
    for seed in range(4):
        run_story(lane, bert.pipeline, seed)
        lane.launch(large, How())
    assert len(queues.blocks) == before


def test_room_is_made_for_the_largest_graph(bert: Runner) -> None:
    """A graph's rectangle of indexes is larger than all that a warm-up's batch has."""
    config = EncodeCudaGraphConfig(batch_sizes=[128], num_tokens=[128], seq_lens=[64], enable_padding=True)
    queues = SimulatedQueues(0)
    lane = QueuedLane(bert.pipeline, queues)
    lane.use(maker_of(bert).maker.make(Buckets.of(config, 128, 128, 64)))
    before = len(queues.blocks)
    batch = [Input(np.array([10], dtype=np.int32))] * 100
    lane.launch(batch, How())
    check(lane.launch(batch, How()).land(), expected_of(bert.pipeline, Asked(batch, How())))
    grown = queues.blocks[before:]
    assert all(len(block) < 1 << 17 for block in grown), "outputs only"
    assert max(len(block) for block in queues.blocks) >= 128 * 64 * 8


def test_a_lane_works_within_inference_mode_and_without(bert: Runner) -> None:
    lane = lane_of(bert, SimulatedQueues(0))
    asked = [Asked(random_batch(np.random.default_rng(number)), How(to_host=bool(number % 3))) for number in range(8)]
    for number, each in enumerate(asked):
        with torch.inference_mode(number % 2 == 0):
            found = lane.launch(each.batch, each.how).land()
        check(found, expected_of(bert.pipeline, each))


@given(
    st.lists(
        st.tuples(st.sampled_from([np.int64, np.int32, np.float32, np.bool_]), st.lists(st.integers(0, 5), max_size=3)),
        max_size=6,
    )
)
def test_a_plan_places_arrays_side_by_side(arrays: list[tuple[Any, list[int]]]) -> None:
    random = np.random.default_rng(0)
    named = {f"a{number}": random.integers(0, 100, shape).astype(dtype) for number, (dtype, shape) in enumerate(arrays)}
    plan = Plan.of(named)
    block = torch.full((plan.nbytes + 8,), 0xAB, dtype=torch.uint8)
    plan.write(named, block)
    views = plan.views(block)
    assert list(views) == list(named)
    for name, array in named.items():
        assert np.array_equal(views[name].numpy(), array)
        assert plan.places[name].start % 256 == 0
        assert views[name].numel() == 0 or views[name].data_ptr() == block.data_ptr() + plan.places[name].start
    assert bool((block[plan.nbytes :] == 0xAB).all())
