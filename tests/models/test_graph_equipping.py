"""What a start with a configuration of graphs does and says."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from packhorse_shared.graph_config import EncodeCudaGraphConfig, GraphConfigError
from packhorse_worker.backend import DeviceLostError
from packhorse_worker.engine.graphs import equipping
from packhorse_worker.engine.graphs.equipping import check_number, equip
from packhorse_worker.engine.graphs.graphs import Graphs
from packhorse_worker.engine.lanes.lane import QueuedLane
from packhorse_worker.engine.runner import Runner
from recorded_graphs import CONFIG, NEAR, inputs_of, raising
from reference import runner_of
from simulated_device import ReadBackError, SimulatedQueues, TapeRecorder
from tiny_families import build_family
from tiny_models import build_t


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return runner_of(build_t(tmp_path_factory.mktemp("graphs") / "t"))


def equipped(
    runner: Runner,
    config: EncodeCudaGraphConfig,
    monkeypatch: pytest.MonkeyPatch,
    breaks: Callable[[str, int], None] = lambda _what, _number: None,
    show_progress: bool | None = False,
) -> tuple[Runner, QueuedLane]:
    monkeypatch.setattr(equipping, "CudaQueues", SimulatedQueues)
    monkeypatch.setattr(equipping, "CudaRecorder", lambda queue, _device: TapeRecorder(queue.device, breaks))
    lane = QueuedLane(runner.pipeline, SimulatedQueues())
    found = Runner(runner.pipeline, lane, runner.facts, runner.limits, runner._grouping)
    equip(found, config, show_progress=show_progress)
    return found, lane


def test_equipped_with_graphs(bert: Runner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        runner, lane = equipped(bert, CONFIG, monkeypatch)
    assert isinstance(lane.graphs, Graphs)
    (record,) = _ours(caplog)
    assert record.message == "captured CUDA graphs"
    assert record.levelname == "INFO"
    assert (record.graphs, record.memory_mib) == (len(lane.graphs), 3)  # type: ignore[attr-defined]
    assert record.seconds >= 0  # type: ignore[attr-defined]
    inputs = inputs_of((5, 3, 1, 40, 12, 12, 7))
    rows = [row for row in runner.run(inputs).rows if row is not None]
    torch.testing.assert_close(torch.stack(rows), bert.pipeline.forward(inputs), rtol=NEAR, atol=NEAR)


def test_the_bar_counts_graphs(bert: Runner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _, lane = equipped(bert, CONFIG, monkeypatch, show_progress=True)
    assert lane.graphs is not None
    shown = capsys.readouterr().err
    assert "capturing CUDA graphs" in shown
    assert f"{len(lane.graphs)}/{len(lane.graphs)}" in shown
    equipped(bert, CONFIG, monkeypatch, show_progress=None)
    assert "capturing CUDA graphs" not in capsys.readouterr().err, "no terminal"


def test_sizes_over_a_limit_are_told(bert: Runner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    config = EncodeCudaGraphConfig(batch_sizes=[4], num_tokens=[32], seq_lens=[16, 512], enable_padding=True)
    with caplog.at_level(logging.INFO):
        equipped(bert, config, monkeypatch)
    assert caplog.messages[0] == "sizes of CUDA graphs: seq_lens: 512 over max_seq_len (64), clamped"


MISSING = "cuda_graph_config lacks num_tokens (or max_num_token): no graph is captured, every batch runs eagerly"
NONE_WITHIN = "cuda_graph_config: no graph is captured, every batch runs eagerly (seq_lens: none within max_seq_len)"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (EncodeCudaGraphConfig(seq_lens=[8]), MISSING),
        (EncodeCudaGraphConfig(num_tokens=[600], seq_lens=[512]), NONE_WITHIN),
    ],
)
def test_a_configuration_without_any_graph_warns_once(
    bert: Runner,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    config: EncodeCudaGraphConfig,
    expected: str,
) -> None:
    runner, lane = equipped(bert, config, monkeypatch)
    assert lane.graphs is None
    assert [(record.levelname, record.message) for record in _ours(caplog)] == [("WARNING", expected)]
    assert runner.run(inputs_of((5, 3))).failures == []


def test_a_cpu_warns_once(bert: Runner, caplog: pytest.LogCaptureFixture) -> None:
    equip(bert, CONFIG, show_progress=False)
    expected = "cuda_graph_config has no effect on a CPU: every batch runs eagerly, with the same vectors"
    assert [(record.levelname, record.message) for record in _ours(caplog)] == [("WARNING", expected)]


def test_a_model_that_cannot_be_packed_warns_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    padded = runner_of(build_family(tmp_path / "mpnet", "mpnet"))
    caplog.clear()
    runner, lane = equipped(padded, CONFIG, monkeypatch)
    expected = "cuda_graph_config has no effect on this model, whose inputs cannot be packed: every batch runs eagerly"
    assert [(record.levelname, record.message) for record in _ours(caplog)] == [("WARNING", expected)]
    inputs = inputs_of((5, 3, 1, 12))
    rows = [row for row in runner.run(inputs).rows if row is not None]
    assert lane.graphs is None
    for row, each in zip(rows, inputs, strict=True):
        torch.testing.assert_close(row, padded.pipeline.forward([each])[0], rtol=NEAR, atol=NEAR)


def test_a_failed_capture_warns_once_and_runs_eagerly(
    bert: Runner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    problem = ReadBackError("operation not permitted when stream is capturing")
    runner, lane = equipped(bert, CONFIG, monkeypatch, raising("record", 1, problem))
    expected = f"cuda_graph_config: no graph is used, every batch runs eagerly: ReadBackError: {problem}"
    assert [(record.levelname, record.message) for record in _ours(caplog)] == [("WARNING", expected)]
    assert lane.graphs is None
    inputs = inputs_of((5, 3, 1))
    rows = [row for row in runner.run(inputs).rows if row is not None]
    torch.testing.assert_close(torch.stack(rows), bert.pipeline.forward(inputs), rtol=NEAR, atol=NEAR)


def test_a_device_lost_at_capture_ends_the_start(bert: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceLostError):
        equipped(bert, CONFIG, monkeypatch, raising("run", 0, RuntimeError("CUDA error: unspecified launch failure")))


def test_too_many_graphs_are_an_error_of_the_configuration(bert: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EncodeCudaGraphConfig(batch_sizes=range(1, 129), num_tokens=range(100, 356), seq_lens=range(1, 65))
    with pytest.raises(
        GraphConfigError, match=r"^cuda_graph_config: asks for \d+ graphs, limit 4096: every combination becomes"
    ):
        equipped(bert, config, monkeypatch)
    equip(bert, config, show_progress=False)  # on a CPU it has no effect
    check_number(bert, config)


def test_too_many_graphs_are_told_before_anything_runs(bert: Runner) -> None:
    config = EncodeCudaGraphConfig(batch_sizes=range(1, 129), num_tokens=range(100, 356), seq_lens=range(1, 65))
    found = Runner(bert.pipeline, QueuedLane(bert.pipeline, SimulatedQueues()), bert.facts, bert.limits, bert._grouping)
    with pytest.raises(GraphConfigError, match="limit 4096"):
        check_number(found, config)
    check_number(found, CONFIG)


def _ours(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What the engine logged: threads that other tests left behind log too."""
    return [record for record in caplog.records if record.name.startswith("packhorse_worker")]
