"""Where a worker gets its settings and its device from, before anything is loaded."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
import pytest

from packhorse_shared.cores import usable_cores
from packhorse_shared.errors import CannotStartError, SettingsError
from packhorse_shared.key_folders import make_keys, read_worker_keys
from packhorse_shared.run_dir import RunDir
from packhorse_shared.settings import BatchingSettings, ModelSettings, Settings, WorkerSettings
from packhorse_worker import joining
from packhorse_worker.__main__ import _parser, _place, main, spinning
from packhorse_worker.joining import join
from packhorse_worker.meeting import RemoteBroker

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
    settings, joined = join(parsed, {"PACKHORSE_MAX_BATCH_SIZE": "1"})
    assert joined == run_dir
    assert settings.model.model == "/models/a"
    assert (settings.batching.max_batch_size, settings.batching.max_num_tokens) == (7, 99)
    assert _place(settings, joined, -1, {}).device == "3"


def test_finds_the_run_dir_by_environment(run_dir: RunDir) -> None:
    settings, joined = join(_parser().parse_args([]), {"PACKHORSE_RUN_DIR": str(run_dir.path)})
    assert (settings, joined) == (SERVER, run_dir)


def test_a_worker_by_hand_runs_on_one_device(run_dir: RunDir) -> None:
    with pytest.raises(SettingsError, match="--devices: a worker runs on one device, not on 0,1"):
        join(_parser().parse_args(["--run_dir", str(run_dir.path), "--devices", "0,1"]), {})


def test_settings_that_others_could_have_written_are_not_believed(run_dir: RunDir) -> None:
    run_dir.path.chmod(0o777)
    with pytest.raises(CannotStartError, match=r"has mode 0777; it must be .*0700"):
        join(_parser().parse_args(["--run_dir", str(run_dir.path)]), {})


def test_without_a_server_it_says_so_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--run_dir", str(tmp_path / "none")]) == 3
    line = capsys.readouterr().err
    assert line.startswith("packhorse worker: no Packhorse runs in")
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


# ---- joining a server on another machine ----


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", ["gpu1"])
    return tmp_path / "keys"


@pytest.fixture
def their_settings(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """What the broker tells; the last one counts."""
    told = [SERVER]
    monkeypatch.setattr(joining, "query_settings", lambda *_: told[-1])
    return told


def remote_flags(keys: Path, *more: str) -> argparse.Namespace:
    return _parser().parse_args(["--broker=tcp://gpu-server:5600", f"--curve_keys={keys / 'gpu1'}", *more])


def test_joins_over_tcp_with_the_servers_settings_and_this_machines_devices(
    keys: Path, their_settings: list[Settings], tmp_path: Path
) -> None:
    model = tmp_path / "copy-of-a"
    model.mkdir()
    environ = {"PACKHORSE_LOG_FORMAT": "json", "PACKHORSE_PORT": "tcp://10.0.0.1:80", "PACKHORSE_SERVICE_HOST": "10.0.0.1"}
    settings, meeting = join(remote_flags(keys, f"--model={model}", "--max-num-tokens=99"), environ)
    assert meeting == RemoteBroker("tcp://gpu-server:5600", read_worker_keys(keys / "gpu1"))
    assert (settings.batching.max_batch_size, settings.batching.max_num_tokens) == (7, 99)
    assert settings.workers.devices == ("auto",)
    assert settings.workers.workers_per_device == 1
    assert settings.model.model == str(model)
    assert settings.process.log_format == "json"
    assert settings.process.curve_keys == str(keys / "gpu1")
    settings, _ = join(remote_flags(keys, f"--model={model}", "--devices=3"), {})
    assert _place(settings, None, -1, {}).device == "3"
    with pytest.raises(SettingsError, match="--devices: a worker runs on one device"):
        join(remote_flags(keys, f"--model={model}", "--devices=3,4"), {})


def test_the_environment_may_name_the_broker(keys: Path, their_settings: list[Settings], run_dir: RunDir) -> None:
    """But what the flags, or a run directory in the environment, say comes first: that is the shell of a server."""
    their_settings.append(msgspec.structs.replace(SERVER, model=ModelSettings()))
    environ = {"PACKHORSE_BROKER": "tcp://gpu-server:5600", "PACKHORSE_CURVE_KEYS": str(keys / "gpu1")}
    assert isinstance(join(_parser().parse_args([]), environ)[1], RemoteBroker)
    assert join(_parser().parse_args([f"--run_dir={run_dir.path}"]), environ)[1] == run_dir
    assert join(_parser().parse_args([]), environ | {"PACKHORSE_RUN_DIR": str(run_dir.path)})[1] == run_dir
    with pytest.raises(SettingsError, match="--broker: --run_dir was given too; name one server"):
        join(remote_flags(keys, f"--run_dir={run_dir.path}"), {})


def test_a_model_folder_that_is_only_on_the_server_is_one_clear_line(keys: Path, their_settings: list[Settings]) -> None:
    with pytest.raises(
        SettingsError, match=r"model: the server serves /models/a, a folder that is not on this machine; .*--model"
    ):
        join(remote_flags(keys), {})


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--broker=tcp://a:5600"], "--broker: tcp:// needs --curve_keys, a folder of keys that packhorse keys makes"),
        (["--curve_keys=k"], "--curve_keys: needs --broker, the address to which the keys belong"),
        (
            ["--broker=tcp://*:5600", "--curve_keys=k"],
            "broker: tcp://*:5600 is where a server listens; give the address of its machine",
        ),
        (["--broker=tcp://a:5600", "--curve_keys=k"], "curve_keys: there is no folder "),
        (["--broker=ipc:///run/x", "--curve_keys=k"], "--broker: 'ipc:///run/x' is not allowed; give tcp://HOST:PORT"),
    ],
)
def test_what_cannot_be_joined_is_one_clear_line(flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == 3
    line = capsys.readouterr().err
    assert line.startswith(f"packhorse worker: {reason}")
    assert line.count("\n") == 1


def test_how_threads_wait_is_set_unless_somebody_did() -> None:
    assert spinning({}) == {"GOMP_SPINCOUNT": "10000"}
    assert spinning({"OMP_WAIT_POLICY": "ACTIVE"}) == spinning({"GOMP_SPINCOUNT": "7"}) == {}
