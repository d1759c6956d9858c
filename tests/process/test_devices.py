"""Workers and their devices, on a machine whose driver lists what a test says. Workers are stand-ins without torch but for the
last tests: what a worker would see is what its process's environment says when it would import torch."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from conftest import StackFactory
from harm import kill, log_of, logged, ready_workers, wait_ready_workers
from packhorse_shared.cores import usable_cores
from process.faults.conftest import standins
from reports.asking import ask
from stack import START_WITHIN_S, Stack
from standin_stack import StandInFactory, StandInStack
from stub_gpus import MISMATCH, NO_DRIVER, cards, driver_environment
from waiting import wait_until

pytestmark = pytest.mark.process

UUIDS = tuple(f"GPU-{digit * 8}-1111-2222-3333-444444444444" for digit in "abcdefgh")
EIGHT = cards(*UUIDS)
SLICED = {"cards": [{"uuid": UUIDS[0], "slices": ["MIG-1a", "MIG-1b"]}, {"uuid": UUIDS[1]}]}
ON_CPU = "no GPU to use, so the model runs on the CPU"


def on(machine: dict[str, Any], visible: str | None = None) -> dict[str, str]:
    """The environment of a server on a machine with these cards."""
    return driver_environment(machine) | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})


@pytest.fixture
def make_standin(t_model: Path) -> Iterator[StandInFactory]:
    with standins(t_model) as make:
        yield make


def devices_of(stack: Stack) -> dict[str, str]:
    """Each worker's device, as /status tells it."""
    return {str(worker["id"]): str(worker["device"]) for worker in ready_workers(stack)}


def _health(stack: Stack) -> int | None:
    """The status of GET /health; None while nobody listens."""
    try:
        return int(stack.http.get("/health").status_code)
    except httpx.TransportError:
        return None


def by_slot(*words: str) -> dict[str, str]:
    return {f"worker-{slot}": word for slot, word in enumerate(words)}


def assert_each_sees_its_own(stack: StandInStack, expected: dict[str, str], uuids: Sequence[str] = ()) -> None:
    """Every worker has its word in /status, and shows its device alone to the libraries that it loads, before torch is among
    them: by its word, or by one of these UUIDs."""
    assert devices_of(stack) == expected
    seen = stack.seen()
    words = zip(expected, uuids, strict=True) if uuids else expected.items()
    assert {name: seen[name].visible for name in expected} == {name: "" if word == "cpu" else word for name, word in words}
    assert {seen[name].pid for name in expected} == {worker["pid"] for worker in ready_workers(stack)}
    assert {seen[name].order for name in expected} == {"PCI_BUS_ID"}
    assert not any(seen[name].has_torch for name in expected)


@pytest.mark.parametrize(
    ("flags", "environment", "expected"),
    [
        ([], on(EIGHT, ",".join(UUIDS)), UUIDS),
        ([], on(EIGHT), tuple("01234567")),
        ([], on({"error": NO_DRIVER}, "GPU-aaaa,GPU-bbbb"), ("GPU-aaaa", "GPU-bbbb")),
        ([], on(SLICED), ("MIG-1a", "MIG-1b", UUIDS[1])),
        (["--devices=0,1", "--workers_per_device=2"], on(EIGHT), ("0", "1", "0", "1")),
        (["--devices=5,GPU-cccc"], on(EIGHT, "5,GPU-cccc"), ("5", "GPU-cccc")),
        (["--devices=cpu", "--workers_per_device=2"], on(EIGHT, "0,1"), ("cpu", "cpu")),
    ],
)
def test_each_device_gets_a_worker_that_sees_it_alone(
    make_standin: StandInFactory, tmp_path: Path, flags: list[str], environment: dict[str, str], expected: tuple[str, ...]
) -> None:
    asked = tmp_path / "asked"
    environment = environment | {"STUB_LOG": str(asked)}
    stack = make_standin(*flags, environment=environment).start().wait_ready(len(expected))
    # Indexes that nobody gave are for people.
    assert_each_sees_its_own(stack, by_slot(*expected), UUIDS if expected == tuple("01234567") else ())
    assert len(stack.processes("worker")) == len(expected)
    threads = {seen.threads for seen in stack.seen().values()}
    assert threads == {str(max(1, usable_cores() // len(expected)))}
    assert ask(stack, {"input": "t10"}).status_code == 200
    assert ON_CPU not in stack.text()
    assert not [line for line in stack.text().splitlines() if " WARNING " in line or " ERROR " in line]
    # The driver is asked once for a server, and by nobody else than the program that counts; for the CPU it is left alone.
    who = asked.read_text().splitlines() if asked.exists() else []
    assert [line.split()[-1] for line in who] == ([] if "--devices=cpu" in flags else ["slots"])


def test_plain_supervisord_follows_the_devices_too(make_standin: StandInFactory) -> None:
    stack = make_standin(environment=on(EIGHT, "7,3,GPU-aaaa"))
    stack.start_under_supervisord()
    stack.wait_ready(3)
    assert_each_sees_its_own(stack, by_slot("7", "3", "GPU-aaaa"))
    kill(ready_workers(stack)[1]["pid"])
    wait_until(lambda: len(list(stack.run_dir.glob("seen-1-*.json"))) == 2, 30, "the second life of worker-1")
    wait_ready_workers(stack, 3)
    assert_each_sees_its_own(stack, by_slot("7", "3", "GPU-aaaa"))


def test_more_and_fewer_workers_go_round_the_devices(make_standin: StandInFactory) -> None:
    stack = make_standin("--workers_per_device=2", environment=on(EIGHT, "2,6")).start().wait_ready(4)
    run_dir = f"--run_dir={stack.run_dir}"
    assert stack.packhorse("scale", "5", run_dir).returncode == 0
    wait_ready_workers(stack, 5)
    assert_each_sees_its_own(stack, by_slot("2", "6", "2", "6", "2"))
    assert stack.packhorse("scale", "2", run_dir).returncode == 0
    wait_ready_workers(stack, 2)
    assert_each_sees_its_own(stack, by_slot("2", "6"))


def test_a_worker_joins_by_hand_on_a_device_of_its_own(make_standin: StandInFactory) -> None:
    stack = make_standin(environment=on(EIGHT, "2,6")).start().wait_ready(2)
    given = stack.join_worker("--devices=3")
    stack.environment = {name: text for name, text in stack.environment.items() if name != "CUDA_VISIBLE_DEVICES"}
    theirs = stack.join_worker()
    try:
        wait_ready_workers(stack, 4)
        assert_each_sees_its_own(stack, by_slot("2", "6") | {f"worker-{given.pid}": "3", f"worker-{theirs.pid}": "2"})
        assert "devices: 3 is not in CUDA_VISIBLE_DEVICES=2,6; a list of devices takes its place" in stack.text()
        assert stack.join_worker("--devices=8").wait(START_WITHIN_S) == 3
        assert "packhorse worker: devices: '8' names no device of this machine; there is GPU 0 to 7" in stack.text()
    finally:
        for worker in (given, theirs):
            worker.terminate()
    assert [worker.wait(20) for worker in (given, theirs)] == [0, 0]
    wait_ready_workers(stack, 2)


@pytest.mark.parametrize(
    ("machine", "visible", "level", "reason"),
    [
        ({"error": NO_DRIVER}, None, "INFO", "no NVIDIA driver is installed"),
        ({"error": MISMATCH}, None, "WARNING", "the NVIDIA driver's library and kernel module are of different versions"),
        (EIGHT, "NoDevFiles", "INFO", "CUDA_VISIBLE_DEVICES=NoDevFiles hides every GPU"),
    ],
)
def test_without_a_gpu_one_line_says_that_it_is_the_cpu(
    make_standin: StandInFactory, machine: dict[str, Any], visible: str | None, level: str, reason: str
) -> None:
    stack = make_standin("--workers_per_device=3", environment=on(machine, visible)).start().wait_ready(3)
    assert_each_sees_its_own(stack, by_slot("cpu", "cpu", "cpu"))
    wait_until(lambda: ON_CPU in stack.text(), 10, "the line")
    (line,) = [line for line in stack.text().splitlines() if ON_CPU in line]
    assert f" {level} slots {ON_CPU}: {reason}" in line


def test_frontends_answer_while_the_driver_is_asked(make_standin: StandInFactory, tmp_path: Path) -> None:
    """It may take ten seconds and more, where nothing keeps it loaded."""
    answers = tmp_path / "the driver answers"
    stack = make_standin(environment=on(EIGHT) | {"STUB_WAIT": str(answers)}).start()
    wait_until(lambda: " WARNING slots waiting for the NVIDIA driver" in stack.text(), 60, "the line")
    wait_until(lambda: _health(stack) == 503, 30, "an answer")
    assert ask(stack, {"input": "t10"}).status_code == 503
    assert not stack.processes("worker")
    answers.touch()
    stack.wait_ready(8)
    assert ask(stack, {"input": "t10"}).status_code == 200
    assert stack.text().count("waiting for the NVIDIA driver") == 1


def test_what_the_driver_kills_is_told_with_its_signal(make_standin: StandInFactory) -> None:
    stack = make_standin(environment=on(EIGHT) | {"STUB_DIES": str(int(signal.SIGSEGV))}).start()
    assert stack.process is not None
    assert stack.process.wait(START_WITHIN_S) == 1
    assert "slots cannot start: it was killed by SIGSEGV" in stack.text().splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "visible", "words"),
    [
        (["--devices=0,8"], None, "devices: '8' names no device of this machine; there is GPU 0 to 7"),
        ([], "0,GPU-zzzz", f"CUDA_VISIBLE_DEVICES: 'GPU-zzzz' names no device of this machine; there is {UUIDS[0]}, "),
        ([], "1,1", "CUDA_VISIBLE_DEVICES: a device is named twice (1,1)"),
        ([], "all", "CUDA_VISIBLE_DEVICES: 'all' is no device"),
    ],
)
def test_a_word_that_names_nothing_stops_the_start(
    make_standin: StandInFactory, flags: list[str], visible: str | None, words: str
) -> None:
    stack = make_standin(*flags, environment=on(EIGHT, visible)).start()
    assert stack.process is not None
    assert stack.process.wait(START_WITHIN_S) == 1
    assert f"slots cannot start: {words}" in stack.text().splitlines()[-1]
    assert not stack.seen(), "no worker was started"


def test_a_word_that_is_wrong_anywhere_is_a_wrong_command_line(make_standin: StandInFactory) -> None:
    stack = make_standin("--devices=cuda:1").start()
    assert stack.process is not None
    assert stack.process.wait(START_WITHIN_S) == 2
    (line,) = stack.text().splitlines()
    assert "--devices: 'cuda:1' is no device to CUDA; write its index 1" in line


def test_a_device_that_is_lost_costs_a_reload_and_no_request(make_standin: StandInFactory) -> None:
    stack = make_standin(environment=on(EIGHT, "2")).start().wait_ready()
    before = ready_workers(stack)[0]["pid"]
    stack.lose_device()
    assert ask(stack, {"input": "t11 t12"}).status_code == 200, "its batch is tried again"
    wait_ready_workers(stack, 1)
    assert ready_workers(stack)[0]["pid"] != before
    assert_each_sees_its_own(stack, by_slot("2"))
    assert logged(stack, r"CRITICAL worker-0 the device is lost, ending: (.*)", "worker-0") == [
        "AcceleratorError: CUDA error: an illegal memory access was encountered"
    ]
    assert "exited: worker-0 (exit status 1; not expected)" in log_of(stack, "supervisord")


def test_a_worker_whose_card_is_lost_is_tried_until_it_is_back(make_standin: StandInFactory) -> None:
    """Whatever is done meanwhile that ends a worker in good order, and so forgets its deaths."""
    stack = make_standin(environment=on(cards(*UUIDS[:2]))).start().wait_ready(2)
    pids = [worker["pid"] for worker in ready_workers(stack)]
    stack.take_devices_away()
    for pid in pids:
        kill(pid)
    for part in ("worker:worker-0", "broker"):
        waits = len(logged(stack, "so it waits", "worker-0"))
        wait_until(lambda: len(logged(stack, "so it waits", "worker-0")) > waits, 60, "the brake")  # noqa: B023
        tries = len(lost(stack))
        assert supervisorctl(stack, "restart", part) == 0
        wait_until(lambda: len(lost(stack)) >= tries + 2, 30, f"tries of worker-0 after a restart of {part}")  # noqa: B023
    assert logged(stack, "stopped while loading cause=(.*)", "worker-0")[:1] == ["signal"]
    assert not logged(stack, "cannot start", "worker-*")
    stack.give_devices_back()
    wait_ready_workers(stack, 2)
    assert_each_sees_its_own(stack, by_slot("0", "1"), UUIDS[:2])


def test_a_card_of_an_earlier_server_is_not_waited_for(make_standin: StandInFactory) -> None:
    """The launcher is killed, with all of its server; the next one finds what that left in the run directory."""
    stack = make_standin(environment=on(cards(UUIDS[0]))).start().wait_ready()
    assert stack.process is not None
    stack.process.send_signal(signal.SIGKILL)
    stack.process.wait(10)
    stack.assert_all_gone(within_s=10)
    stack.take_devices_away()
    stack.start()
    assert stack.process.wait(START_WITHIN_S) == 1
    words = f"finds no device under CUDA_VISIBLE_DEVICES={UUIDS[0]} (GPU 0 when the server started)"
    assert words in stack.text().splitlines()[-1]
    assert not lost(stack)
    assert "exited: worker-0 (exit status 3; expected)" in log_of(stack, "supervisord")


def lost(stack: Stack) -> list[str]:
    return logged(stack, "the model could not be loaded: devices: .* finds no device", "worker-0")


def supervisorctl(stack: Stack, *words: str) -> int:
    command = [str(Path(sys.executable).parent / "supervisorctl"), "-s", f"unix://{stack.run_dir}/supervisor.sock", *words]
    return subprocess.run(command, capture_output=True, check=False, timeout=60).returncode


# ---- with torch ----


def test_a_real_worker_whose_device_is_lost(t_model: Path, tmp_path: Path) -> None:
    """A sticky error of CUDA's as torch raises it, out of a forward pass: the next process answers."""
    from trap_model import LOSES_DEVICE, build_trap_model, trap

    model = build_trap_model(t_model, tmp_path / "model", most_tokens=1 << 20)
    stack = Stack("--trust_remote_code", "--devices=cpu", model=model, environment={"HF_MODULES_CACHE": str(tmp_path / "code")})
    try:
        stack.start().wait_ready()
        before = stack.workers("ready", "busy")[0]["pid"]
        answer = stack.http.post("/v1/embeddings", json={"input": [trap(LOSES_DEVICE), "t10"]}, timeout=60)
        assert answer.status_code == 200, answer.text
        assert stack.workers("ready", "busy")[0]["pid"] != before
        assert logged(stack, r"CRITICAL worker-0 the device is lost, ending: (.*)", "worker-0") == [
            "AcceleratorError: CUDA error: an illegal memory access was encountered"
        ]
        assert "exited: worker-0 (exit status 1; not expected)" in log_of(stack, "supervisord")
    finally:
        stack.clean()


def test_torch_that_finds_no_device_ends_the_start_with_one_line(make_stack: StackFactory, t_model: Path) -> None:
    """The driver lists a GPU, and torch finds none: a build for the CPU, or, with other cards, one that is not there."""
    stack = make_stack(model=t_model, environment=on(cards(UUIDS[0]), UUIDS[0])).start()
    assert stack.process is not None
    assert stack.process.wait(START_WITHIN_S) == 1
    last = stack.text().splitlines()[-1]
    assert "worker-0 cannot start: devices: " in last
    assert UUIDS[0] in last
    assert "--devices cpu" in last
    assert "Traceback" not in stack.text()
    assert "exited: worker-0 (exit status 3; expected)" in log_of(stack, "supervisord")


def test_real_workers_on_the_cpu_leave_the_driver_alone(make_stack: StackFactory, t_model: Path, tmp_path: Path) -> None:
    """A server for the CPU on a machine with GPUs: no process loads CUDA's library or asks the driver for anything."""
    asked = tmp_path / "asked"
    environment = on(EIGHT, "0,1") | {"STUB_LOG": str(asked)}
    stack = make_stack("--devices=cpu", "--workers_per_device=2", model=t_model, environment=environment)
    stack.start().wait_ready(2)
    assert devices_of(stack) == by_slot("cpu", "cpu")
    assert ask(stack, {"input": ["t10", "t11", "t12"]}).status_code == 200
    for process in stack.processes():
        assert not [
            region.path for region in process.memory_maps() if "libcuda.so" in region.path or "nvidia-ml" in region.path
        ]
    assert not asked.exists()
    threads = str(max(1, usable_cores() // 2))
    assert [logged(stack, r" ready .*threads=(\d+)", f"worker-{slot}") for slot in (0, 1)] == [[threads]] * 2
