"""Processes come, go and are killed; no accepted request is lost."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from conftest import StackFactory
from stack import Stack
from waiting import wait_until

pytestmark = pytest.mark.process


class Load:
    """Clients that send singles until told to stop, and count every outcome."""

    def __init__(self, stack: Stack, clients: int, text: str = "t10 t11 t12") -> None:
        self.stack = stack
        self.outcomes: Counter[str] = Counter()
        self.text = text
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(clients)
        self._clients: list[Future[None]] = [self._pool.submit(self._client) for _ in range(clients)]

    def _client(self) -> None:
        with httpx.Client(timeout=60) as http:
            while not self._stop.is_set():
                try:
                    answer = http.post(f"{self.stack.url}/v1/embeddings", json={"input": self.text})
                    outcome = str(answer.status_code)
                except httpx.TransportError as problem:
                    outcome = type(problem).__name__
                self.outcomes[outcome] += 1

    @property
    def answered(self) -> int:
        return self.outcomes.total()

    def wait_for(self, more: int) -> None:
        """Wait until that many more requests have ended."""
        goal = self.answered + more
        wait_until(lambda: self.answered >= goal, 60, f"{more} more answers, have {self.outcomes}")

    def stop(self) -> Counter[str]:
        self._stop.set()
        for each in self._clients:
            each.result(timeout=70)
        self._pool.shutdown()
        return self.outcomes


def test_kill_of_one_of_two_workers_loses_nothing(make_stack: StackFactory, t_model: Path) -> None:
    stack = make_stack("--workers_per_device=2", model=t_model).start().wait_ready(workers=2)
    load = Load(stack, clients=8)
    load.wait_for(200)
    victim = stack.workers("ready", "busy")[0]
    os.kill(victim["pid"], signal.SIGKILL)
    load.wait_for(200)
    wait_until(lambda: len(stack.workers("ready", "busy")) == 2, 60, "the killed worker's successor")
    load.wait_for(200)
    assert set(load.stop()) == {"200"}
    assert victim["pid"] not in [worker["pid"] for worker in stack.workers("ready", "busy")]


def test_sigterm_under_load_answers_all_that_was_accepted(make_stack: StackFactory, slow_model: Path) -> None:
    stack = make_stack("--max_batch_size=1", model=slow_model).start().wait_ready()
    with ThreadPoolExecutor(30) as pool:
        answers = [pool.submit(_post, stack, ["t10 " * 20] * 2) for _ in range(30)]
        wait_until(lambda: _accepted(stack) == 60, 30, "every input to be accepted")
        stack.terminate()
        assert Counter(answer.result(timeout=60) for answer in answers) == {200: 30}
    assert stack.wait_stopped() == 0


def test_draining_server_refuses_new_requests(make_stack: StackFactory, slow_model: Path) -> None:
    stack = make_stack("--max_batch_size=1", model=slow_model).start().wait_ready()
    with ThreadPoolExecutor(1) as pool, httpx.Client(timeout=60) as http:
        accepted = pool.submit(_post, stack, ["t10 " * 20] * 60)
        wait_until(lambda: _in_system(stack) >= 40, 20, "the request to be accepted")
        stack.terminate()
        refused = wait_until(lambda: _refusal(http, stack), 10, "a refusal")
        assert refused.headers["connection"] == "close"
        assert int(refused.headers["retry-after"]) >= 1
        assert accepted.result(timeout=60) == 200
    assert stack.wait_stopped() == 0, stack.text()


def test_a_worker_started_by_hand_joins_and_leaves(make_stack: StackFactory, t_model: Path) -> None:
    stack = make_stack("--max_batch_size=4", model=t_model).start().wait_ready()
    joined = stack.join_worker()
    wait_until(lambda: len(stack.workers("ready", "busy")) == 2, 60, "the second worker")
    load = Load(stack, clients=16)
    wait_until(lambda: _inputs_of(stack, joined.pid) > 20, 60, "the second worker to take work")
    joined.send_signal(signal.SIGTERM)
    assert joined.wait(30) == 0
    load.wait_for(100)
    assert set(load.stop()) == {"200"}
    assert len(stack.workers("ready", "busy")) == 1


def test_scale_leaves_running_workers_alone(make_stack: StackFactory, t_model: Path) -> None:
    stack = make_stack(model=t_model).start().wait_ready()
    first = stack.workers("ready", "busy")[0]["pid"]
    load = Load(stack, clients=4)
    assert (up := stack.packhorse("scale", "2", f"--run_dir={stack.run_dir}")).returncode == 0, up.stderr
    wait_until(lambda: len(stack.workers("ready", "busy")) == 2, 60, "a second worker")
    assert (down := stack.packhorse("scale", "1", f"--run_dir={stack.run_dir}")).returncode == 0, down.stderr
    wait_until(lambda: len(stack.workers("ready", "busy")) == 1, 60, "one worker again")
    load.wait_for(50)
    assert set(load.stop()) == {"200"}
    assert stack.workers("ready", "busy")[0]["pid"] == first


def test_broker_restart_is_survived(make_stack: StackFactory, t_model: Path) -> None:
    """Workers and frontends come back to the new broker by themselves, with the same worker processes."""
    stack = make_stack(model=t_model).start().wait_ready()
    worker = stack.workers("ready", "busy")[0]["pid"]
    load = Load(stack, clients=4)
    load.wait_for(50)
    stack.processes("broker")[0].kill()
    wait_until(lambda: load.outcomes["200"] and _is_healthy(stack), 30, "the server to be back")
    load.wait_for(100)
    assert set(load.stop()) <= {"200", "503"}
    assert [each["pid"] for each in stack.workers("ready", "busy")] == [worker]


def test_killed_launcher_leaves_nothing_behind(make_stack: StackFactory, t_model: Path) -> None:
    stack = make_stack("--num_frontends=2", model=t_model).start().wait_ready()
    assert stack.process is not None
    assert len(stack.processes()) >= 5  # supervisord, broker, worker, two frontends
    stack.process.kill()
    stack.process.wait(10)
    stack.assert_all_gone(within_s=15)


def test_start_again_after_everything_was_killed(make_stack: StackFactory, t_model: Path) -> None:
    """What a crash leaves in the run directory does not block the next start."""
    stack = make_stack(model=t_model).start().wait_ready()
    for each in stack.processes():
        each.send_signal(signal.SIGKILL)
    assert stack.process is not None
    stack.process.kill()
    stack.process.wait(10)
    stack.assert_all_gone(within_s=15)
    assert list(stack.run_dir.glob("*.ipc")), "the crash left sockets, else this test shows nothing"
    stack.start().wait_ready()
    assert _post(stack, "t10") == 200
    assert stack.stop() == 0


def test_second_signal_forces(make_stack: StackFactory, slow_model: Path) -> None:
    stack = make_stack("--max_batch_size=1", model=slow_model).start().wait_ready()
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(_post, stack, ["t10 " * 20] * 600)
        wait_until(lambda: _in_system(stack) > 100, 20, "a long queue")
        stack.terminate()
        wait_until(lambda: "stopping" in stack.text().lower(), 10, "the first signal to be seen")
        assert stack.process is not None
        stack.process.send_signal(signal.SIGINT)
        assert stack.process.wait(10) == 1
        stack.assert_all_gone(within_s=5)
        assert isinstance(pending.exception(timeout=20), httpx.TransportError)


def test_plain_supervisord(make_stack: StackFactory, t_model: Path) -> None:
    """The production way: supervisord on the shipped file, settings from the environment; SIGTERM drains."""
    stack = make_stack(model=t_model, environment={"PACKHORSE_NUM_FRONTENDS": "2", "PACKHORSE_WORKERS_PER_DEVICE": "2"})
    stack.start_under_supervisord().wait_ready(workers=2)
    assert len(stack.processes("frontend")) == 2
    assert _post(stack, "t10") == 200
    scaled = stack.packhorse("scale", "1", f"--run_dir={stack.run_dir}")
    assert scaled.returncode == 0, scaled.stderr
    wait_until(lambda: len(stack.workers("ready", "busy")) == 1, 30, "one worker")
    load = Load(stack, clients=4)
    load.wait_for(50)
    assert set(load.stop()) == {"200"}
    assert stack.stop() == 0


def _post(stack: Stack, texts: str | list[str]) -> int:
    return httpx.post(f"{stack.url}/v1/embeddings", json={"input": texts}, timeout=120).status_code


def _refusal(http: httpx.Client, stack: Stack) -> httpx.Response | None:
    answer = http.post(f"{stack.url}/v1/embeddings", json={"input": "t10"})
    return answer if answer.status_code == 503 else None


def _is_healthy(stack: Stack) -> bool:
    try:
        return httpx.get(f"{stack.url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def _in_system(stack: Stack) -> int:
    status = stack.status()
    return int(status["queue"]["inputs"]) + sum(int(worker["in_flight"]) for worker in status["workers"])


def _accepted(stack: Stack) -> int:
    """Inputs that were ever let in: those that wait, run or are done."""
    status = stack.status()
    return int(status["queue"]["inputs"]) + sum(int(each["in_flight"]) + int(each["inputs"]) for each in status["workers"])


def _inputs_of(stack: Stack, pid: int) -> int:
    pids = {pid, *(child.pid for child in psutil.Process(pid).children())}
    return sum(int(worker["inputs"]) for worker in stack.status()["workers"] if worker["pid"] in pids)
