"""Where a worker gets its settings and its device from, before anything is loaded."""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from packhorse_shared.devices import find_devices
from packhorse_shared.errors import CannotStartError, SettingsError
from packhorse_shared.key_folders import make_keys, read_worker_keys
from packhorse_shared.run_dir import RunDir, ServerDevices
from packhorse_shared.settings import BatchingSettings, ModelSettings, Settings, WorkerSettings
from packhorse_worker import __main__ as worker_main
from packhorse_worker import joining
from packhorse_worker import place as place_module
from packhorse_worker.__main__ import _parser, main
from packhorse_worker.backend import DeviceLostError
from packhorse_worker.cuda_device import check_cuda
from packhorse_worker.joining import join, left_out
from packhorse_worker.meeting import RemoteBroker
from packhorse_worker.place import BY_HAND, Place, environment_of, find_place
from packhorse_worker.sighting import Sighting, life_of
from stub_gpus import MISMATCH, cards, pretend

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
    assert find_place(settings.workers, run_dir, BY_HAND, {})[0].device == "3"


def test_what_a_file_sets_and_the_server_decides_is_told(run_dir: RunDir, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("max_batch_size: 3\ndtype: float32\ncuda_graph_config: {enable_padding: true}\n")
    parsed = _parser().parse_args(["--run_dir", str(run_dir.path), "--config", str(file), "--dtype", "float32"])
    settings, joined = join(parsed, {})
    assert (settings.batching.max_batch_size, settings.model.dtype, settings.model.cuda_graph_config) == (7, "float32", None)
    assert left_out(parsed, {"PACKHORSE_MAX_BATCH_SIZE": "3"}, joined) == (
        f"{file} sets cuda_graph_config, max_batch_size: a worker that joins takes them from its server; what differs here "
        "must be a flag"
    )
    assert not left_out(_parser().parse_args(["--run_dir", str(run_dir.path)]), {}, joined)
    file.write_text("dtype: bfloat16\n")
    assert not left_out(parsed, {}, joined), "the flag counts"


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


# ---- devices and cores ----


@pytest.mark.parametrize(
    ("slot", "device"),
    [(0, "GPU-a"), (1, "GPU-b"), (2, "GPU-a"), (3, "GPU-b"), (4, "GPU-a"), (63, "GPU-b"), (BY_HAND, "GPU-a")],
)
def test_slots_go_round_the_devices(run_dir: RunDir, slot: int, device: str) -> None:
    """Whatever number of workers `packhorse scale` leaves, the lowest slots are spread over all devices."""
    assert find_place(SERVER.workers, run_dir, slot, {})[0].device == device


def test_what_auto_meant_at_the_start_holds_for_the_life_of_the_server(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card that is lost would turn the next worker into one on another card, or on the CPU, without a word."""
    auto = WorkerSettings()
    pretend(monkeypatch, cards("GPU-a", "GPU-b", "GPU-c"))
    assert [find_place(auto, run_dir, slot, {})[0].device for slot in (0, 1, 2)] == ["0", "1", "2"]
    run_dir.write_devices(ServerDevices(None, ("0", "1", "2")))
    for machine in (cards("GPU-a"), {"error": MISMATCH}):
        pretend(monkeypatch, machine)
        assert [find_place(auto, run_dir, slot, {})[0].device for slot in (0, 1, 2)] == ["0", "1", "2"]
    pretend(monkeypatch, cards("GPU-a"))
    assert find_place(auto, run_dir, 0, {"CUDA_VISIBLE_DEVICES": "GPU-a"})[0].device == "GPU-a", "another server's file"


def test_a_card_that_falls_off_the_bus_gives_its_index_to_no_other(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA counts without a card that it cannot reach: 2 would be the card that was 3, which has a worker of its own."""
    pretend(monkeypatch, cards("GPU-a", "GPU-b", "GPU-c"))

    def assert_told() -> None:
        places = [find_place(WorkerSettings(), run_dir, slot, {})[0] for slot in (BY_HAND, 0, 1, 2)]
        assert [place.device for place in places] == ["0", "0", "1", "2"], "people know cards by their index"
        told = [environment_of(place, {})["CUDA_VISIBLE_DEVICES"] for place in places]
        assert told == ["GPU-a", "GPU-a", "GPU-b", "GPU-c"]

    assert_told()
    found = find_devices(("auto",), {})
    run_dir.write_devices(ServerDevices(None, found.words, found.uuids))
    pretend(monkeypatch, {"cards": [{"uuid": "GPU-a"}, {"lost": True}, {"uuid": "GPU-c"}]})
    assert_told()


@pytest.mark.parametrize(("devices", "visible"), [(("2", "GPU-a"), None), (("auto",), "2,GPU-a")])
def test_words_that_a_user_gave_are_handed_on_as_they_are(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, devices: tuple[str, ...], visible: str | None
) -> None:
    pretend(monkeypatch, cards("GPU-aaaa", "GPU-bbbb", "GPU-cccc"))
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    found = find_devices(devices, environ)
    run_dir.write_devices(ServerDevices(visible, found.words, found.uuids))
    places = [find_place(WorkerSettings(devices=devices), run_dir, slot, environ)[0] for slot in (0, 1)]
    assert [environment_of(place, environ)["CUDA_VISIBLE_DEVICES"] for place in places] == ["2", "GPU-a"]


def devices_json(**changes: object) -> str:
    return json.dumps({"cuda_visible_devices": None, "words": ["0"], "uuids": []} | changes)


@pytest.mark.parametrize(
    "content",
    [
        None,
        "{",
        devices_json(words=[]),
        devices_json(words=["0\0"]),
        devices_json(words=["GPU-" + "a" * 300]),
        devices_json(words=["auto"]),
        devices_json(words=[" 0"]),
        devices_json(uuids=["GPU-a", "GPU-b"]),
        devices_json(uuids=["GPU-\0"]),
        "pipe",
        "folder",
    ],
)
def test_without_the_servers_devices_a_worker_says_that_it_decides_anew(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, content: str | None
) -> None:
    """When the driver fails at that moment, a worker would go on on the CPU without a word."""
    pretend(monkeypatch, {"error": MISMATCH})
    if content == "pipe":
        os.mkfifo(run_dir.devices_file)
    elif content == "folder":
        run_dir.devices_file.mkdir()
    elif content is not None:
        run_dir.devices_file.write_text(content)
    with caplog.at_level(logging.INFO, "packhorse_worker"):
        place, devices = find_place(WorkerSettings(), run_dir, 0, {})
    assert place.device == "cpu"
    assert [remark.is_warning for remark in devices.remarks] == [True]
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == (
        f"devices: {run_dir.devices_file} is missing or not readable, so this worker decides anew what auto means; "
        "supervisorctl start slots writes it again"
    )


def test_another_view_of_the_gpus_than_the_servers_is_said(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pretend(monkeypatch, cards("GPU-a", "GPU-b"))
    run_dir.write_devices(ServerDevices("0", ("0",)))
    with caplog.at_level(logging.INFO, "packhorse_worker"):
        assert find_place(WorkerSettings(), run_dir, 0, {"CUDA_VISIBLE_DEVICES": "1"})[0].device == "1"
        assert find_place(WorkerSettings(), run_dir, BY_HAND, {"CUDA_VISIBLE_DEVICES": "1"})[0].device == "1"
    (record,) = caplog.records
    assert record.getMessage() == (
        "devices: CUDA_VISIBLE_DEVICES was 0 when the server started and is 1 here, so this worker decides anew what auto "
        "means; supervisorctl start slots writes it again"
    )


def test_a_worker_of_a_server_logs_what_it_found_when_it_decides_anew(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, {"error": MISMATCH})
    monkeypatch.setattr(worker_main, "_run", lambda *_, **__: 0)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert main([f"--run_dir={run_dir.path}", "--slot=0", "--model=/models/a"]) == 0
    shown = capsys.readouterr().err
    assert "is missing or not readable, so this worker decides anew" in shown
    assert "WARNING worker-0 no GPU to use, so the model runs on the CPU: the NVIDIA driver's library" in shown


def test_a_worker_by_hand_takes_the_servers_devices_unless_its_shell_shows_others(run_dir: RunDir) -> None:
    run_dir.write_devices(ServerDevices("3,4", ("3", "4")))
    assert find_place(WorkerSettings(), run_dir, BY_HAND, {})[0].device == "3"
    assert find_place(WorkerSettings(), run_dir, BY_HAND, {"CUDA_VISIBLE_DEVICES": "5"})[0].device == "5"
    assert find_place(WorkerSettings(devices=("6",)), run_dir, BY_HAND, {"CUDA_VISIBLE_DEVICES": "5"})[0].device == "6"


def test_a_worker_by_hand_on_a_device_that_is_not_there_is_one_clear_line(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, cards("GPU-a", "GPU-b"))
    assert main([f"--run_dir={run_dir.path}", "--devices=3"]) == 3
    line = capsys.readouterr().err
    assert line == "packhorse worker: devices: '3' names no device of this machine; there is GPU 0 to 1 (nvidia-smi -L)\n"


@pytest.mark.parametrize("word", ["3", "GPU-aaaa", "MIG-GPU-a/1/0"])
def test_a_worker_sees_its_device_alone(word: str) -> None:
    place = Place(None, 0, word, 2, 1)
    assert environment_of(place, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}) == {
        "CUDA_VISIBLE_DEVICES": word,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "OMP_NUM_THREADS": "2",
        "MKL_NUM_THREADS": "2",
        "GOMP_SPINCOUNT": "10000",
    }
    assert "CUDA_DEVICE_ORDER" not in environment_of(place, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"})


def test_a_worker_on_the_cpu_sees_no_device() -> None:
    assert environment_of(Place(None, 0, "cpu", 2, 1), {"CUDA_VISIBLE_DEVICES": "0"})["CUDA_VISIBLE_DEVICES"] == ""


def test_how_threads_wait_is_set_unless_somebody_did() -> None:
    for theirs in ({"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "7"}):
        assert "GOMP_SPINCOUNT" not in environment_of(Place(None, 0, "cpu", 2, 1), theirs)


@pytest.mark.parametrize("devices", [("cpu",), ("0", "1"), tuple("01234567")])
def test_workers_share_the_usable_cores(run_dir: RunDir, devices: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place_module, "usable_cores", lambda: 32)

    def threads(workers: int) -> int:
        return find_place(WorkerSettings(devices=devices, workers_per_device=workers), run_dir, 0, {})[0].threads

    assert threads(1) == 32 // len(devices)
    assert threads(4) == max(1, 32 // (4 * len(devices)))
    assert threads(64) == 1


ON_0 = Place(None, 0, "0", 2, 1)


class FakeTorch:
    """As much of torch as is asked whether it finds a device."""

    __version__ = "2.13.0"

    def __init__(self, cuda: str | None, problem: str = "", *, finds: bool = False) -> None:
        self.version = SimpleNamespace(cuda=cuda)
        self.cuda = SimpleNamespace(is_available=lambda: finds, init=self._init)
        self._problem = problem

    def _init(self) -> None:
        if self._problem:
            raise RuntimeError(self._problem)


@pytest.mark.parametrize(
    ("torch", "machine", "words"),
    [
        (
            FakeTorch(None),
            cards("GPU-a"),
            "this PyTorch (2.13.0) is built without CUDA, and device 0 needs it; install",
        ),
        (
            FakeTorch("13.0", "The NVIDIA driver on your system is too old (found version 11040).\nPlease update"),
            cards("GPU-a"),
            "PyTorch 2.13.0 for CUDA 13.0 finds no device under CUDA_VISIBLE_DEVICES=0: The NVIDIA driver on your system is "
            "too old (found version 11040); the driver lists 1 GPU. ",
        ),
        (
            FakeTorch("13.0", "No CUDA GPUs are available"),
            {"error": MISMATCH},
            "No CUDA GPUs are available; the NVIDIA driver's library and kernel module are of different versions",
        ),
        (FakeTorch("13.0"), cards("GPU-a", "GPU-b"), "it gives no reason; the driver lists 2 GPUs. "),
    ],
)
def test_torch_that_finds_no_device_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, torch: FakeTorch, machine: dict[str, Any], words: str
) -> None:
    pretend(monkeypatch, machine)
    with pytest.raises(CannotStartError) as raised:
        check_cuda(torch, ON_0)
    assert str(raised.value).startswith("devices: ")
    assert words in str(raised.value)
    assert "--devices cpu" in str(raised.value)
    assert "\n" not in str(raised.value)
    check_cuda(FakeTorch("13.0", finds=True), ON_0)


def test_a_card_that_was_there_may_come_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A worker whose card is lost ends for good when the card is not back at once, and somebody has to start it by hand."""
    pretend(monkeypatch, cards("GPU-a"))
    lost = FakeTorch("13.0", "unknown error")
    place = replace(ON_0, sighting=Sighting(tmp_path / "seen", "0", "this server"))
    with pytest.raises(CannotStartError, match="finds no device under CUDA_VISIBLE_DEVICES=0"):
        check_cuda(lost, place)
    check_cuda(FakeTorch("13.0", finds=True), place)
    for _ in range(2):
        with pytest.raises(DeviceLostError, match="finds no device under CUDA_VISIBLE_DEVICES=0"):
            check_cuda(lost, place)
    with pytest.raises(CannotStartError, match="without CUDA"):
        check_cuda(FakeTorch(None), place)
    for word, life in (("1", "this server"), ("0", "the next server")):
        with pytest.raises(CannotStartError):
            check_cuda(lost, replace(place, sighting=Sighting(tmp_path / "seen", word, life)))


def test_a_card_is_told_by_its_index_too(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, cards("GPU-a"))
    with pytest.raises(CannotStartError, match=r"finds no device under CUDA_VISIBLE_DEVICES=GPU-b \(GPU 1 .*\): unknown"):
        check_cuda(FakeTorch("13.0", "unknown error"), Place(None, 0, "1", 2, 1, "GPU-b"))


@pytest.mark.parametrize("obstacle", ["pipe", "folder", "nonsense", "no room"])
def test_a_sighting_that_cannot_be_noted_stops_no_worker(
    tmp_path: Path, obstacle: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "seen"
    if obstacle == "pipe":
        os.mkfifo(path)
    elif obstacle == "folder":
        path.mkdir()
    elif obstacle == "nonsense":
        path.write_bytes(b"\xff")
    else:
        path = tmp_path / "missing" / "seen"
    sighting = Sighting(path, "0", "this server")
    assert not sighting.is_noted()
    sighting.note()
    assert sighting.is_noted() == (obstacle in ("pipe", "nonsense"))
    assert ["cannot note that the device was there" in each.getMessage() for each in caplog.records] == [True] * (
        not sighting.is_noted()
    )


def test_a_process_has_one_life() -> None:
    """Ids come again, in a container even the same for every server."""
    assert life_of(os.getpid()) == life_of(os.getpid())
    assert life_of(os.getpid()) != life_of(os.getppid())
    with subprocess.Popen(["sleep", "60"]) as other:
        assert life_of(other.pid).split()[-1] != life_of(os.getpid()).split()[-1], "it started later"
        other.kill()


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
    assert find_place(settings.workers, None, BY_HAND, {})[0].device == "3"
    with pytest.raises(SettingsError, match="--devices: a worker runs on one device"):
        join(remote_flags(keys, f"--model={model}", "--devices=3,4"), {})


def test_what_a_file_says_of_this_machine_counts(keys: Path, their_settings: list[Settings], tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"curve_keys: {keys / 'gpu1'}\ndevices: 3\nmax_batch_size: 3\nport: 1\n")
    their_settings.append(msgspec.structs.replace(SERVER, model=ModelSettings()))
    parsed = _parser().parse_args(["--broker", "tcp://gpu-server:5600", "--config", str(file)])
    settings, joined = join(parsed, environ := {"PACKHORSE_PORT": "2"})
    assert (settings.workers.devices, settings.batching.max_batch_size) == (("3",), 7)
    assert left_out(parsed, environ, joined).startswith(f"{file} sets max_batch_size: a worker that joins takes")


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
