"""Where a worker gets its settings and its device from, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from packhorse_shared.cores import usable_cores
from packhorse_shared.errors import CannotStartError, SettingsError
from packhorse_shared.run_dir import RunDir
from packhorse_shared.settings import BatchingSettings, ModelSettings, Settings, WorkerSettings
from packhorse_worker.__main__ import _join, _parser, _place, main

SERVER = Settings(
    model=ModelSettings(model="/models/a"),
    batching=BatchingSettings(max_batch_size=7),
    workers=WorkerSettings(devices=("GPU-a", "GPU-b"), workers_per_device=2),
)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path / "run")
    found.prepare()
    found.write_settings(SERVER)
    return found


def test_joins_with_the_servers_settings_and_its_own_flags(run_dir: RunDir) -> None:
    parsed = _parser().parse_args(["--run_dir", str(run_dir.path), "--devices", "3", "--max-num-tokens=99"])
    settings, joined = _join(parsed, {"PACKHORSE_MAX_BATCH_SIZE": "1"})
    assert joined == run_dir
    assert settings.model.model == "/models/a"
    assert (settings.batching.max_batch_size, settings.batching.max_num_tokens) == (7, 99)
    assert _place(settings, joined, -1, {}).device == "3"


def test_finds_the_run_dir_by_environment(run_dir: RunDir) -> None:
    settings, joined = _join(_parser().parse_args([]), {"PACKHORSE_RUN_DIR": str(run_dir.path)})
    assert (settings, joined) == (SERVER, run_dir)


def test_a_worker_by_hand_runs_on_one_device(run_dir: RunDir) -> None:
    with pytest.raises(SettingsError, match="--devices: a worker runs on one device, not on 0,1"):
        _join(_parser().parse_args(["--run_dir", str(run_dir.path), "--devices", "0,1"]), {})


def test_settings_that_others_could_have_written_are_not_believed(run_dir: RunDir) -> None:
    run_dir.path.chmod(0o777)
    with pytest.raises(CannotStartError, match=r"has mode 0777; it must be .*0700"):
        _join(_parser().parse_args(["--run_dir", str(run_dir.path)]), {})


def test_without_a_server_it_says_so_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--run_dir", str(tmp_path / "none")]) == 3
    line = capsys.readouterr().err
    assert line.startswith("packhorse worker: run_dir: cannot read")
    assert line.count("\n") == 1
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(("slot", "device"), [(0, "GPU-a"), (1, "GPU-a"), (2, "GPU-b"), (3, "GPU-b"), (4, "GPU-a")])
def test_slots_fill_one_device_after_the_other(run_dir: RunDir, slot: int, device: str) -> None:
    assert _place(SERVER, run_dir, slot, {}).device == device


def test_cpu_workers_share_the_usable_cores(run_dir: RunDir) -> None:
    def threads(workers: int) -> int:
        settings = Settings(workers=WorkerSettings(devices=("cpu",), workers_per_device=workers))
        return _place(settings, run_dir, 0, {}).threads

    assert threads(1) == usable_cores()
    assert threads(64) == max(1, usable_cores() // 64)
