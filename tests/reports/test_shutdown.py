"""Stops and starts of all parts over supervisord's control socket, as an operator does them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from load import Load
from questions import random_questions
from reports.asking import ask
from stack import ROOT
from standin_stack import StandInFactory, StandInStack

pytestmark = pytest.mark.process

SEED = 89
CONF = ROOT / "supervisord.conf"
SETTINGS = {"PACKHORSE_WORKERS_PER_DEVICE": "2", "PACKHORSE_SHUTDOWN_GRACE": "2"}
ENDED = {"ConnectionRefusedError", "ConnectionResetError", "closed without an answer"}


def supervisorctl(stack: StandInStack, *words: str) -> str:
    ended = subprocess.run(
        [str(Path(sys.executable).parent / "supervisorctl"), "-c", str(CONF), *words],
        cwd=stack.run_dir,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert "ERROR" not in ended.stdout, ended.stdout
    return ended.stdout


@pytest.mark.timeout(400)
def test_a_stop_under_load_leaves_no_process(make_standin: StandInFactory, soak: bool) -> None:
    """A stop that reaches a shell, or one process of a group, leaves others behind that hold the device's memory."""
    stack = make_standin(environment=SETTINGS, batch_s=0.02)
    stack.start_under_supervisord().wait_ready(2)
    assert stack.process is not None
    supervisord = psutil.Process(stack.process.pid)
    for _ in range(10 if soak else 1):
        parts = supervisord.children(recursive=True)
        groups = {os.getpgid(part.pid) for part in parts}
        with Load(stack.port, random_questions(SEED), clients=8, seed=SEED) as load:
            load.wait_for(30)
            supervisorctl(stack, "stop", "all")
            assert supervisord.children(recursive=True) == []
            assert not [process for process in psutil.process_iter() if group_of(process) in groups]
        report = load.report()
        report.assert_invariant(may_be_lost=lambda sent: sent.problem in ENDED)
        assert set(report.counts) - ENDED <= {200, 503}
        supervisorctl(stack, "start", "broker", "slots")
        stack.wait_ready(2)
        assert ask(stack, {"input": "t10"}).status_code == 200
    assert stack.stop() == 0


def group_of(process: psutil.Process) -> int | None:
    try:
        return None if process.status() == psutil.STATUS_ZOMBIE else os.getpgid(process.pid)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return None
