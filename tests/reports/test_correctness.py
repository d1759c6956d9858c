"""Every vector is its own input's, whatever runs beside it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from load import Load
from questions import Question, ask, ids_of, learn, random_questions
from report import Report
from stack import Stack
from standin import row_of
from standin_stack import StandInFactory

pytestmark = pytest.mark.process

SEED = 58
CLIENTS = 32
IN_ORDER = ["t10 t11 t12 t13 t14", "t20", "t30 t31"]


def test_parallel_clients_get_their_own_vectors(stack: Stack, soak: bool) -> None:
    """Calls at the same time write over each other's tensors: zeros, or what another client asked for."""
    requests = CLIENTS * (100 if soak else 10)
    questions = learn(stack.url, random_questions(SEED, CLIENTS * (10 if soak else 2), longest=62))
    with Load(stack.port, questions, clients=CLIENTS, at_most=requests, seed=SEED) as load:
        report = load.wait_done(within_s=100)
    assert_served(report, requests)


def assert_served(report: Report, requests: int) -> None:
    """Vectors for all, their own. On a machine so busy that the worker is not heard of for a second a few are told to come
    back (503); a mixture or a refusal of the tokenizer would be wrong vectors or a 500."""
    report.assert_invariant()
    assert set(report.counts) <= {200, 503}
    assert report.counts[200] >= 0.98 * requests


def test_a_list_keeps_its_order_under_load(stack: Stack, soak: bool) -> None:
    """Vectors in the order in which they were done, which is rarely the order of the list."""
    times = 200 if soak else 50
    together = ask(IN_ORDER)
    alone = learn(stack.url, [ask([text]) for text in IN_ORDER])
    expected = replace(together, rows=np.concatenate([each.rows for each in alone]), tolerance=1e-5)
    others = learn(stack.url, random_questions(SEED, 20, inputs=3, longest=62))
    with (
        Load(stack.port, others, clients=4, seed=SEED) as noise,
        Load(stack.port, [expected], clients=1, at_most=times) as load,
    ):
        report = load.wait_done(within_s=100)
    for each in (report, noise.report()):
        each.assert_invariant()
    assert dict(report.counts) == {200: times}


def test_one_tokenizer_for_all_of_its_users(make_standin: StandInFactory, soak: bool) -> None:
    """A tokenizer used by several threads, or switched from one way to another under them, refuses or answers wrongly."""
    clients = 64
    requests = clients * (200 if soak else 40)
    stack = make_standin("--max_batch_size=64", batch_s=0.001, logs_ids=False).start().wait_ready()
    questions = [without_special_tokens(question) for question in random_texts(60)] + random_questions(SEED, 60, inputs=3)
    with Load(stack.port, questions + random_questions(SEED, 60), clients=clients, at_most=requests, seed=SEED) as load:
        report = load.wait_done(within_s=100)
    assert_served(report, requests)


def random_texts(count: int) -> list[str]:
    draw = np.random.default_rng(SEED)
    return [" ".join(f"t{word}" for word in draw.integers(10, 90, 1 + number % 60)) for number in range(count)]


def without_special_tokens(text: str) -> Question:
    """A request of a text whose ids are its words and nothing else."""
    asked = ask([text], fields={"add_special_tokens": False})
    return replace(asked, rows=row_of(ids_of(text)[1:-1])[None])
