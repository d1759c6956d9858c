"""The packhorse command: what it prints, how it ends, and that no command pays for another's libraries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import packhorse.locate as locate_module
import packhorse.status as status_command
from packhorse import cli
from packhorse.conf import conf_path
from packhorse.embeddings import with_absolute_paths
from packhorse.locate import locate, tool_parser
from packhorse.slots import worker_count
from packhorse.status import summary
from packhorse_shared import __version__
from packhorse_shared.devices import Devices
from packhorse_shared.errors import CannotStartError, SettingsError
from packhorse_shared.messages import ModelStatus, QueueStatus, RateStatus, StatusReport, WorkerStatus
from packhorse_shared.run_dir import RunDir
from packhorse_shared.settings import HttpSettings, ModelSettings, ProcessSettings, Settings, WorkerSettings

REPORT = StatusReport(
    version="0.1.0",
    model=ModelStatus("tiny", "embedding", 32, 64, "float32"),
    queue=QueueStatus(3, 2, 1.25, 2048),
    workers=[WorkerStatus("worker-0", 17, "cpu\x1b[2J", "busy", 4, 5, 60, 700, 0.5, 3 << 20)],
    rates=RateStatus(1.0, 2.0, 30.5),
)


def run(*argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "packhorse", *argv],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=dict(os.environ) | environ,
    )


@pytest.fixture
def live_run_dir(tmp_path: Path) -> RunDir:
    """A run directory that looks like a running server's."""
    run_dir = RunDir(tmp_path / "r")
    run_dir.prepare()
    run_dir.lock()
    return run_dir


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"packhorse {__version__}\n"


def test_help_lists_the_commands_within_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    for command in ("embeddings", "broker", "worker", "frontend", "status", "scale", "conf"):
        assert command in text


@pytest.mark.parametrize("command", ["status", "scale", "bench"])
def test_tools_say_which_server_they_mean_not_where_to_listen(command: str) -> None:
    shown = " ".join(run(command, "--help").stdout.split())
    assert "the server of this user on this port" in shown
    assert "listen" not in shown
    assert ("by default the only one that this user runs" in shown) == (command != "bench")


def test_no_command_prints_the_help_and_fails() -> None:
    assert cli.main([]) == 2


def test_an_unknown_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["embedings"]) == 2
    assert capsys.readouterr().err == "packhorse: unknown command embedings; did you mean embeddings? (see packhorse --help)\n"


def test_conf_prints_the_shipped_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["conf"]) == 0
    assert capsys.readouterr().out.strip() == str(conf_path())
    assert "[program:broker]" in conf_path().read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [
        (["embeddings", "--max_batchsize=4"], 2, "did you mean --max_batch_size?"),
        (["embeddings", "/no/such/model", "--port=1"], 1, "there is no folder /no/such/model"),
        (["embeddings", "a", "--model=b"], 2, "name one model"),
        (["embeddings", "--api_key_file=/no/such"], 2, "--api_key_file: there is no file /no/such"),
        (["embeddings", "--host=no.such.host.invalid"], 1, "host: no.such.host.invalid cannot be resolved"),
        (["embeddings", "--uds=/no/such/folder/s"], 1, "uds: there is no folder /no/such/folder"),
        (["status", "--port=1"], 1, "no Packhorse runs in"),
        (["scale", "2", "--port=1"], 1, "no Packhorse runs in"),
        (["scale"], 2, "N"),
        (["scale", "many"], 2, "N"),
        (["broker", "--nonsense"], 2, "unknown flag --nonsense"),
        (["slots"], 3, "run by supervisord"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes_are_one_line(argv: list[str], status: int, words: str, tmp_path: Path) -> None:
    if argv[0] == "embeddings":
        argv = [*argv, f"--run_dir={tmp_path / 'r'}"]
    ended = run(*argv)
    assert ended.returncode == status, ended
    assert ended.stdout == ""
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert words in ended.stderr


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    ended = run("embeddings", str(tmp_path), f"--run_dir={tmp_path / 'r'}")
    assert ended.returncode == 1
    assert "has no config.json" in ended.stderr


def test_a_server_that_runs_already_is_refused(live_run_dir: RunDir) -> None:
    ended = run("embeddings", f"--run_dir={live_run_dir.path}")
    assert ended.returncode == 1
    assert f"another Packhorse runs in {live_run_dir.path}" in ended.stderr


def test_a_file_in_the_way_of_the_control_socket_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    folder.mkdir(mode=0o700)
    (folder / "supervisor.sock").write_text("mine")
    ended = run("embeddings", f"--run_dir={folder}")
    assert ended.returncode == 1
    assert "it is not a socket, so it was not removed" in ended.stderr
    assert (folder / "supervisor.sock").read_text() == "mine"


@pytest.mark.parametrize("module", ["packhorse.cli", "packhorse_frontend.__main__", "packhorse_broker.__main__"])
def test_no_torch_outside_the_worker(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout.strip() == "[]"


def test_the_command_itself_is_cheap() -> None:
    code = "import sys, packhorse.cli; print(sorted({'zmq', 'rich', 'numpy', 'supervisor', 'starlette'} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout.strip() == "[]"


def test_a_supervised_part_whose_supervisord_is_gone_ends(tmp_path: Path) -> None:
    """Its parent is another process by then: here, pytest."""
    ended = run("broker", PACKHORSE_SUPERVISED="1", PACKHORSE_RUN_DIR=str(tmp_path / "r"))
    assert ended.returncode == 3
    assert not (tmp_path / "r").exists()


def test_paths_are_absolute_for_processes_that_run_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    settings = with_absolute_paths(
        Settings(
            model=ModelSettings(model="model"),
            http=HttpSettings(uds="s", ssl_certfile="c", ssl_keyfile="k", api_key_file="~/keys"),
            process=ProcessSettings(run_dir="r"),
        )
    )
    assert settings.model.model == str(tmp_path / "model")
    assert (settings.http.uds, settings.http.ssl_certfile, settings.http.ssl_keyfile) == tuple(
        str(tmp_path / name) for name in "sck"
    )
    assert settings.http.api_key_file == str(Path.home() / "keys")
    assert settings.process.run_dir == str(tmp_path / "r")
    assert with_absolute_paths(Settings(model=ModelSettings(model="org/name"))).model.model == "org/name"


def test_worker_count() -> None:
    assert worker_count(Settings(), Devices(("cpu",))) == 1
    assert worker_count(Settings(), Devices(("GPU-a", "GPU-b"))) == 2
    assert worker_count(Settings(workers=WorkerSettings(workers_per_device=3)), Devices(("0", "1"))) == 6
    with pytest.raises(SettingsError, match="64 on each of 2 devices make 128 workers, limit 64"):
        worker_count(Settings(workers=WorkerSettings(workers_per_device=64)), Devices(("0", "1")))


def test_kubernetes_port_names_no_server(live_run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pod beside a service called packhorse, tools still find the only server, whatever its port."""
    monkeypatch.setattr(locate_module, "find_running", lambda _xdg: live_run_dir)
    _, found = locate(tool_parser("status", ""), [], {"PACKHORSE_PORT": "tcp://10.0.0.7:8000"})
    assert found is live_run_dir
    with pytest.raises(CannotStartError, match="no Packhorse runs in"):
        locate(tool_parser("status", ""), [], {"PACKHORSE_PORT": "1"})


def test_status_for_people_and_machines(
    live_run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(status_command, "query_status", lambda run_dir, timeout_s: REPORT)
    flag = f"--run_dir={live_run_dir.path}"
    assert cli.main(["status", "--json", flag]) == 0
    assert json.loads(capsys.readouterr().out)["workers"][0]["id"] == "worker-0"
    assert cli.main(["status", flag]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    row = next(line for line in text.splitlines() if line.startswith("worker-0"))
    assert row.split() == ["worker-0", "17", r"cpu\x1b[2J", "busy", "4", "5", "60", "700", "50", "3"]
    assert "waiting  3 of 2048 inputs in 2 requests, the oldest for 1.2 ms" in text
    assert "1.0 requests/s, 2.0 inputs/s, 30.5 tokens/s" in text


def test_status_before_a_worker_is_ready() -> None:
    report = StatusReport("0.1.0", None, QueueStatus(0, 0, 0.0, 8), [], RateStatus(0.0, 0.0, 0.0))
    assert "no worker is ready yet" in summary(report)[0]
    assert summary(report)[1] == "waiting  0 of 8 inputs in 0 requests"
