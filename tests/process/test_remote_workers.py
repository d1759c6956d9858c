"""``packhorse worker --broker tcp://...``: the real model, the real commands, on loopback."""

from __future__ import annotations

import shutil
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from conftest import StackFactory
from remote_machine import RemoteMachine
from stack import Stack
from waiting import wait_until

pytestmark = pytest.mark.process

TEXTS = [f"t{10 + number % 90} t{10 + number // 2 % 90}" for number in range(64)]


@pytest.fixture
def machine() -> Iterator[RemoteMachine]:
    with RemoteMachine() as made:
        yield made


def vectors(stack: Stack) -> np.ndarray:
    """Of all texts, each in a request of its own, so that all workers have a part in it."""

    def ask(text: str) -> list[float]:
        answer = stack.http.post("/v1/embeddings", json={"input": text}, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"][0]["embedding"]

    with ThreadPoolExecutor(16) as pool:
        return np.array(list(pool.map(ask, TEXTS)))


def test_it_joins_takes_work_and_leaves_without_a_loss(
    make_stack: StackFactory, t_model: Path, machine: RemoteMachine, tmp_path: Path
) -> None:
    stack = make_stack("--max_batch_size=1", *machine.server_flags, model=t_model).start().wait_ready()
    before = vectors(stack)
    copy = tmp_path / "a-copy"
    shutil.copytree(t_model, copy)
    worker = machine.start_worker(stack, f"--model={copy}", "--log_format=json")
    stack.wait_ready(workers=2)
    assert {each["id"] for each in stack.workers("ready")} == {"worker-0", machine.name_of(worker)}
    np.testing.assert_allclose(vectors(stack), before, atol=1e-5)
    shares = {each["id"]: each["inputs"] for each in stack.status()["workers"]}
    assert shares[machine.name_of(worker)] > 0
    assert stack.status()["model"]["name"] == t_model.name
    with ThreadPoolExecutor(1) as pool:
        loaded = pool.submit(lambda: [vectors(stack) for _ in range(3)])
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(30) == 0, machine.log()
        for found in loaded.result(60):
            np.testing.assert_allclose(found, before, atol=1e-5)
    assert stack.stop() == 0


def test_what_cannot_start_says_why_in_one_line(make_stack: StackFactory, t_model: Path, machine: RemoteMachine) -> None:
    moved = t_model.with_name("t-moved")
    shutil.copytree(t_model, moved, dirs_exist_ok=True)
    stack = make_stack(*machine.server_flags, model=moved).start().wait_ready()
    moved.rename(t_model.with_name("t-gone"))
    nowhere = machine.start_worker(stack)
    assert nowhere.wait(60) == 3
    assert machine.log().splitlines() == [
        f"packhorse worker: model: the server serves {moved}, a folder that is not on this machine; name its copy with --model"
    ]
    machine.log_file.unlink()
    (machine.folder / "broker" / "allowed" / "gpu1.key").unlink()

    def is_refused() -> bool:
        return machine.start_worker(stack).wait(60) == 3 and "does not allow the key of" in machine.log()

    wait_until(is_refused, 30)
    assert all("does not allow the key of" in line or "serves" in line for line in machine.log().splitlines())
    assert stack.http.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (
            lambda machine: (machine.folder / "broker" / "broker.key_secret").chmod(0o644),
            "has mode 0644: a secret key is for its owner",
        ),
        (lambda machine: (machine.folder / "broker").rename(machine.folder / "aside"), "there is no folder"),
    ],
)
def test_a_server_whose_keys_cannot_be_used_does_not_start(
    make_stack: StackFactory, t_model: Path, machine: RemoteMachine, spoil: object, line: str
) -> None:
    spoil(machine)  # type: ignore[operator]
    stack = make_stack(*machine.server_flags, model=t_model).start()
    assert stack.process is not None
    assert stack.process.wait(30) == 2
    (said,) = stack.text().splitlines()
    assert said.startswith("packhorse embeddings: curve_keys: ")
    assert line in said


def test_a_server_whose_brokers_port_is_taken_does_not_start(
    make_stack: StackFactory, t_model: Path, machine: RemoteMachine
) -> None:
    with socket.create_server(("127.0.0.1", machine.port)):
        stack = make_stack(*machine.server_flags, model=t_model).start()
        assert stack.process is not None
        assert stack.process.wait(60) == 1
    last = stack.text().splitlines()[-1]
    assert f"broker cannot start: broker: cannot listen on tcp://127.0.0.1:{machine.port}: Address already in use" in last
