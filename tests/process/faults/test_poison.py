"""Inputs that kill their worker: each is found in exactly three deaths, and costs nobody else more than time."""

from __future__ import annotations

import time
from contextlib import ExitStack

import orjson
import pytest

from aims import Aims
from footprint import Settled
from harm import logged, wait_ready_workers
from http_answers import HttpAnswer
from load import Load
from questions import ids_of, random_questions
from raw_http import connect, post, read_to_end
from report import joined
from standin_stack import StandInFactory, StandInStack

pytestmark = pytest.mark.process

SEED = 59
POISONS = (98, 99)
CLIENTS = 40
"""More than two batches, so that some inputs always wait and every batch is full."""
RATE = 50
"""Of those who come whatever happens: were no worker left, they would be refused."""
FOUND_WITHIN_S = 30.0
DEATH = "worker lost: "


@pytest.fixture(scope="module")
def stack(make_shared_standin: StandInFactory) -> StandInStack:
    return (
        make_shared_standin("--workers_per_device=4", "--max_batch_size=9", batch_s=0.015, kill=POISONS).start().wait_ready(4)
    )


def send_at_once(port: int, texts: list[str]) -> list[HttpAnswer]:
    """The answers of requests that arrive together. A second poison that comes when the first has left one worker of the four
    takes that one too: nobody can know better."""
    with ExitStack() as connections:
        waiting = [connections.enter_context(connect(port, longest_wait_s=FOUND_WITHIN_S)) for _ in texts]
        for connection, text in zip(waiting, texts, strict=True):
            connection.sendall(post(orjson.dumps({"input": text}), b"Connection: close"))
        return [read_to_end(connection, longest_wait_s=FOUND_WITHIN_S).answers[0] for connection in waiting]


@pytest.mark.parametrize("poisons", [POISONS[:1], POISONS], ids=["one", "two at once"])
def test_poison(stack: StandInStack, settled: Settled, aims: Aims, poisons: tuple[int, ...]) -> None:
    stack.forget_deaths()
    stack.set_traps(load_s=0.4)  # longer than an input needs to kill the next worker too
    texts = [f"t{poison} t{10 + len(poisons)}" for poison in poisons]
    deaths_before = len(logged(stack, DEATH))
    with settled(stack):
        with (
            Load(stack.port, random_questions(SEED), clients=CLIENTS, seed=SEED) as load,
            Load(stack.port, random_questions(SEED), rate=RATE, seed=SEED) as newcomers,
        ):
            load.wait_for(5 * CLIENTS)
            began = time.monotonic()
            found = send_at_once(stack.port, texts)
            found_after_s = time.monotonic() - began
            wait_ready_workers(stack, 4)
            load.wait_for(5 * CLIENTS)
        report = joined([load.report(), newcomers.report()])
    print(f"seed {SEED}: {report}; found after {found_after_s:.2f} s")
    for text, answer in zip(texts, found, strict=True):
        assert answer.status == 500, answer.body
        assert orjson.loads(answer.body)["error"]["code"] == "worker_died"
        batches = [batch.ids for batch in stack.computed() if ids_of(text) in batch.ids]
        sizes = [len(ids) for ids in batches]
        assert len(sizes) == 3, f"inputs of the batches that it was in: {sizes}"
        aims.note("inputs that shared the first batch of one that kills", sizes[0] - 1, "", at_least=1)
        assert sizes[-1] == 1
    deaths = len(logged(stack, DEATH)) - deaths_before
    assert deaths == 3 if len(poisons) == 1 else 3 <= deaths <= 6, deaths
    report.assert_invariant()
    assert set(report.counts) == {200}, "\n".join(logged(stack, ".* worker (?:lost|ready).*"))
    aims.note(f"{len(poisons)} inputs that kill found", found_after_s, "s", at_most=6)
