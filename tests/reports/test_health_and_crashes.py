"""Workers that die, raise or run out of memory: health says so, only the guilty fail, and nobody waits for ever."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch

from aims import Aims
from edges.test_http_embeddings import error, vectors
from load import Load
from models.test_runner import Inputs, first_values, inputs, run, runner_with
from questions import learn, random_questions
from reports.asking import ask, wait_idle
from stack import Stack
from standin_stack import StandInFactory
from waiting import wait_until

SEED = 71
SHARING = 8
NOTICED_WITHIN_S = 3.0
DEADLINE_S = 60.0


@pytest.mark.process
def test_no_worker_is_no_health(make_standin: StandInFactory, aims: Aims) -> None:
    """A server whose only worker is dead says that it is well, so that nobody starts it again, and lets requests hang."""
    stack = make_standin().start().wait_ready()
    stack.set_traps(load_s=60.0)  # its successor is not there for the rest of the test
    os.kill(stack.workers("ready", "busy")[0]["pid"], signal.SIGKILL)
    wait_until(lambda: stack.http.get("/health").status_code == 503, NOTICED_WITHIN_S, "health to tell")
    began = time.monotonic()
    answer = ask(stack, {"input": "t10"})
    aims.note("a refusal without any worker", 1000 * (time.monotonic() - began), "ms", at_most=100)
    assert error(answer, 503)["type"] == "overloaded_error"
    assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.process
def test_ready_means_that_the_next_request_is_answered(make_standin: StandInFactory, soak: bool) -> None:
    """Ready as soon as the port is open, while the model loads for another while: the first users meet errors."""
    load_s = 10.0 if soak else 3.0
    stack = make_standin(load_s=load_s).start()
    seen: list[int] = []

    def health() -> int:
        try:
            seen.append(stack.http.get("/health").status_code)
        except httpx.TransportError:
            return 0
        return seen[-1]

    wait_until(lambda: health() == 503, 60, "the port to be open")
    assert error(ask(stack, {"input": "t10"}), 503)["code"] in ("loading", "no_worker")
    wait_until(lambda: health() == 200, 60, "readiness")
    assert stack.computed(), "ready only behind a forward"
    assert set(seen) == {503, 200}
    for _ in range(20):
        assert ask(stack, {"input": "t10"}).status_code == 200


@pytest.mark.process
def test_a_batch_that_raises_does_not_end_the_worker(make_standin: StandInFactory) -> None:
    """One exception leaves the loop of the worker, which is there and never answers again."""
    stack = make_standin("--max_batch_size=4", raises_every=5).start().wait_ready()
    pid = stack.workers("ready", "busy")[0]["pid"]
    with Load(stack.port, random_questions(SEED, 100), clients=8, at_most=200, seed=SEED) as load:
        report = load.wait_done()
    report.assert_invariant()
    assert set(report.counts) == {200, 500}
    assert report.counts[500] >= 200 // 4 // 5, "whole batches fail"
    assert report.counts[200] >= 100
    assert [worker["pid"] for worker in stack.workers("ready", "busy")] == [pid]


@pytest.fixture(scope="module")
def trapped(t_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The real engine with a model that falls into traps; batches of eight wait until they are full."""
    from trap_model import build_trap_model

    folder = tmp_path_factory.mktemp("traps")
    model = build_trap_model(t_model, folder / "model", most_tokens=1 << 20)
    stack = Stack(
        "--trust_remote_code",
        f"--max_batch_size={SHARING}",
        "--max_queue_delay=5",
        model=model,
        environment={"HF_MODULES_CACHE": str(folder / "code")},
    )
    try:
        yield stack.start().wait_ready()
    finally:
        stack.clean()


@pytest.mark.process
def test_one_bad_input_fails_its_own_request_only(trapped: Stack) -> None:
    """Eight requests share a forward; one of them makes the model raise, and all eight fail."""
    from trap_model import RAISES, trap

    before = trapped.workers("ready", "busy")[0]
    texts = [f"t{10 + number}" for number in range(SHARING - 1)]
    with ThreadPoolExecutor(SHARING) as pool:
        bad = pool.submit(ask, trapped, {"input": trap(RAISES)})
        good = [pool.submit(ask, trapped, {"input": text}) for text in texts]
        assert error(bad.result(), 500)["code"] == "forward_failed"
        for answer in good:
            assert len(vectors(answer.result())) == 1
    after = trapped.workers("ready", "busy")[0]
    assert (after["pid"], after["batches"] - before["batches"]) == (before["pid"], 1)


def test_a_batch_that_does_not_fit_is_split() -> None:
    """Out of memory ends in a server that hangs, or fails what would fit by itself."""

    def trouble(ids: Inputs) -> None:
        if len(ids) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    runner, _ = runner_with(trouble, max_num_tokens=1024)
    for _ in range(3):
        outcome, failures = run(runner, inputs(*[[1] * 8] * 64))
        assert failures == []
        assert first_values(outcome) == [8.0] * 64
    outcome, failures = run(runner, inputs([1, 1]))
    assert (first_values(outcome), failures) == ([2.0], [])


@pytest.mark.process
@pytest.mark.timeout(900)
def test_mixed_load_leaves_no_request_open(stack: Stack, soak: bool) -> None:
    """Some shape of input, or some pattern of clients, hangs the whole server without a line in its log."""
    counts = (1, 2, 7, 40, 200) if soak else (1, 2, 7, 40)
    shapes = [(count, longest) for count in counts for longest in (1, 5, 30, 62)]
    questions = learn(stack.url, [random_questions(SEED, 1, inputs=count, longest=longest)[0] for count, longest in shapes])
    until = time.monotonic() + (600.0 if soak else 3.0)
    with Load(stack.port, questions, clients=20, seed=SEED) as load:
        wait_until(lambda: time.monotonic() > until, 610, "the time of the load")
    report = load.report()
    print(f"seed {SEED}: {report}")
    report.assert_invariant(DEADLINE_S)
    assert set(report.counts) <= {200, 429}
    wait_idle(stack)
