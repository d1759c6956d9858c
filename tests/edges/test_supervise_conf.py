"""The shipped supervisord.conf, read by supervisor itself: the promises that the launcher and the docs build on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from supervisor.datatypes import RestartWhenExitUnexpected
from supervisor.options import ServerOptions

from packhorse.conf import conf_path
from packhorse_shared.arguments import EXIT_USAGE
from packhorse_shared.environment import SUPERVISED
from packhorse_shared.errors import EXIT_CANNOT_START
from packhorse_shared.settings import MAX_FRONTENDS, MAX_PROCESSES, MAX_SHUTDOWN_GRACE_S


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The file as supervisord reads it when it is started in an empty folder, without any setting in the environment."""
    monkeypatch.chdir(tmp_path)
    read = ServerOptions()
    read.realize(["-c", str(conf_path())], doc="")
    return read


@pytest.fixture
def programs(options: Any) -> dict[str, list[Any]]:
    by_name = {group.name: {each.name: each for each in group.process_configs} for group in options.process_group_configs}
    return {
        group: [processes[name] for name in sorted(processes, key=lambda name: (len(name), name))]
        for group, processes in by_name.items()
    }


def test_it_is_the_file_that_the_wheel_carries() -> None:
    assert conf_path() == Path(__file__).resolve().parents[2] / "supervisord.conf"


def test_the_programs(programs: dict[str, list[Any]]) -> None:
    assert {name: len(processes) for name, processes in programs.items()} == {
        "broker": 1,
        "slots": 1,
        "worker": MAX_PROCESSES,
        "frontend": MAX_FRONTENDS,
    }
    assert [each.command for each in programs["broker"] + programs["slots"]] == ["packhorse broker", "packhorse slots"]
    for index in (0, MAX_PROCESSES - 1):
        worker = programs["worker"][index]
        assert (worker.name, worker.command) == (f"worker-{index}", f"packhorse worker --slot {index}")
        assert worker.stdout_logfile == f"worker-{index}.log"
    assert programs["frontend"][3].command == "packhorse frontend --index 3"
    assert programs["frontend"][3].stdout_logfile == "frontend-3.log"


def test_only_broker_and_slots_start_by_themselves(programs: dict[str, list[Any]]) -> None:
    assert {name for name, processes in programs.items() if any(each.autostart for each in processes)} == {"broker", "slots"}


def test_how_every_process_is_started_again_and_stopped(programs: dict[str, list[Any]]) -> None:
    for each in (process for processes in programs.values() for process in processes):
        assert each.autorestart is RestartWhenExitUnexpected
        assert each.startsecs == 0
        assert {EXIT_USAGE, EXIT_CANNOT_START} <= set(each.exitcodes)
        assert (0 in each.exitcodes) == (each.name == "slots")
        assert each.stopsignal.name == "SIGTERM"
        assert each.stopasgroup
        assert each.killasgroup
        assert each.stopwaitsecs > MAX_SHUTDOWN_GRACE_S


def test_output_goes_to_rotating_files_in_the_present_folder(programs: dict[str, list[Any]], options: Any) -> None:
    for each in (process for processes in programs.values() for process in processes):
        assert each.redirect_stderr
        assert "/" not in each.stdout_logfile
        assert 0 < each.stdout_logfile_maxbytes <= 100 << 20
        assert each.stdout_logfile_backups >= 1
    assert Path(options.logfile) == Path.cwd() / "supervisord.log"
    assert Path(options.pidfile) == Path.cwd() / "supervisord.pid"


def test_frontends_stop_first_and_the_broker_last(options: Any) -> None:
    priority = {group.name: group.priority for group in options.process_group_configs}
    assert priority["frontend"] > priority["worker"] > priority["broker"]


def test_control_is_over_a_private_socket_only(options: Any) -> None:
    assert [config["family"].name for config in options.server_configs] == ["AF_UNIX"]
    assert Path(options.server_configs[0]["file"]) == Path.cwd() / "supervisor.sock"
    assert options.server_configs[0]["chmod"] == 0o700


def test_the_environment_of_the_processes(programs: dict[str, list[Any]], options: Any) -> None:
    assert options.nodaemon
    for each in (process for processes in programs.values() for process in processes):
        assert each.environment == {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", SUPERVISED: "1"}


def test_no_setting_is_interpolated() -> None:
    lines = [line.split(";")[0] for line in conf_path().read_text(encoding="utf-8").splitlines()]
    assert not [line for line in lines if "ENV_" in line]
