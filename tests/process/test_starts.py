"""Starting: calm when it works, one clear line and exit 1 when it cannot."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import httpx
import psutil
import pytest

from conftest import StackFactory
from stack import START_WITHIN_S, Stack
from waiting import wait_until

pytestmark = pytest.mark.process


def ends_with(stack: Stack) -> int:
    """The launcher's exit status, once it ends by itself."""
    assert stack.process is not None
    return stack.process.wait(START_WITHIN_S)


def test_start_prints_one_line_per_step(minilm_stack: Stack) -> None:
    wait_until(lambda: "ready on http" in minilm_stack.text(), 10, "the ready line")
    lines = minilm_stack.text().splitlines()
    for step in ("loading model", "warming up", f"ready on http://127.0.0.1:{minilm_stack.port}"):
        assert sum(step in line for line in lines) == 1, f"{step!r} in:\n{minilm_stack.text()}"
    assert len(lines) < 20
    assert not [line for line in lines if "WARNING" in line or "ERROR" in line]


def test_frontends_answer_503_while_the_model_loads(make_stack: StackFactory) -> None:
    """Listening from the start, ready only when a forward has run, and then no request fails."""
    stack = make_stack().start()
    seen: list[int] = []

    def health() -> int:
        try:
            seen.append(httpx.get(f"{stack.url}/health", timeout=5).status_code)
        except httpx.TransportError:
            return 0
        return seen[-1]

    wait_until(lambda: health() == 503, START_WITHIN_S, "the frontend to listen")
    early = httpx.post(f"{stack.url}/v1/embeddings", json={"input": "x"})
    assert early.status_code == 503
    assert int(early.headers["retry-after"]) >= 1
    wait_until(lambda: health() == 200, START_WITHIN_S, "readiness")
    assert set(seen) == {503, 200}
    assert httpx.post(f"{stack.url}/v1/embeddings", json={"input": "x"}, timeout=30).status_code == 200


def test_frontends_and_broker_stay_small(minilm_stack: Stack) -> None:
    for role in ("frontend", "broker"):
        for process in minilm_stack.processes(role):
            assert process.memory_info().rss < 200 << 20, role
            assert not any("libtorch" in region.path for region in process.memory_maps()), role
    assert any("libtorch" in region.path for region in minilm_stack.processes("worker")[0].memory_maps())


def test_missing_weights(make_stack: StackFactory, t_model: Path, tmp_path: Path) -> None:
    model = shutil.copytree(t_model, tmp_path / "copy")
    (model / "model.safetensors").unlink()
    stack = make_stack(model=model).start()
    assert ends_with(stack) == 1
    last = stack.text().strip().splitlines()[-1]
    assert "model.safetensors" in last
    assert "Traceback" not in stack.text()


def test_missing_tokenizer(make_stack: StackFactory, t_model: Path, tmp_path: Path) -> None:
    model = shutil.copytree(t_model, tmp_path / "copy")
    (model / "tokenizer.json").unlink()
    stack = make_stack(model=model).start()
    assert ends_with(stack) == 1
    assert "tokenizer.json" in stack.text().strip().splitlines()[-1]


def test_port_in_use(make_stack: StackFactory, t_model: Path) -> None:
    stack = make_stack(model=t_model)
    with socket.create_server(("127.0.0.1", stack.port)):
        stack.start()
        assert ends_with(stack) == 1
    assert f"{stack.port}" in stack.text().strip().splitlines()[-1]
    assert "--port" in stack.text()


def test_a_second_server_on_the_same_port_is_refused(make_stack: StackFactory, t_model: Path) -> None:
    """SO_REUSEPORT would let two servers share a port in silence, each getting half of the requests."""
    first = make_stack(model=t_model).start().wait_ready()
    second = make_stack(model=t_model)
    second.port = first.port
    second.start()
    assert ends_with(second) == 1
    assert str(first.port) in second.text().strip().splitlines()[-1]
    third = make_stack(model=t_model)
    third.port = first.port
    third.start_under_supervisord()
    wait_until(lambda: "is served by the Packhorse" in _logs(third), START_WITHIN_S, "the refusal in the log")
    for _ in range(20):
        assert httpx.post(f"{first.url}/v1/embeddings", json={"input": "t10"}).status_code == 200


def test_unknown_settings_stop_the_start(make_stack: StackFactory) -> None:
    stack = make_stack("--max_batchsize=4").start()
    assert ends_with(stack) == 2
    assert "max_batch_size" in stack.text()
    assert len(stack.text().strip().splitlines()) == 1


def test_status_command(minilm_stack: Stack) -> None:
    people = minilm_stack.packhorse("status", f"--run_dir={minilm_stack.run_dir}")
    assert people.returncode == 0, people.stderr
    assert "all-MiniLM-L6-v2" in people.stdout
    machines = minilm_stack.packhorse("status", "--json", f"--run_dir={minilm_stack.run_dir}")
    assert '"all-MiniLM-L6-v2"' in machines.stdout
    nobody = minilm_stack.packhorse("status", "--port=1")
    assert nobody.returncode == 1
    assert len(nobody.stderr.strip().splitlines()) == 1


def test_idle_costs_nothing(minilm_stack: Stack) -> None:
    """No process spins while nothing happens. The share is measured by the kernel, over a quarter of a minute."""
    processes = minilm_stack.processes()
    assert len(processes) >= 4
    before = {process.pid: _cpu_s(process) for process in processes}
    psutil.wait_procs(processes, timeout=15)  # none ends: this is the idle time
    for process in processes:
        assert (_cpu_s(process) - before[process.pid]) / 15 < 0.02, process.cmdline()


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _logs(stack: Stack) -> str:
    return "".join(path.read_text(errors="replace") for path in stack.run_dir.glob("*.log"))
