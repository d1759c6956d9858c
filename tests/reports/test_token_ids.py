"""Ids instead of texts: clients that tokenize by themselves send them by default. The real model behind a real server."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

from aims import Aims
from edges.test_http_embeddings import error, vectors
from reports.asking import ask
from stack import Stack

pytestmark = pytest.mark.process


def test_ids_give_the_vector_of_their_text(stack: Stack) -> None:
    """Lists of ids refused, or run through the tokenizer a second time."""
    answer = ask(stack, {"input": [[2, 10, 11, 3], [2, 20, 3]]})
    by_ids, by_text = vectors(answer), vectors(ask(stack, {"input": "t10 t11"}))
    assert len(by_ids) == 2
    assert by_ids[0] @ by_text[0] >= 0.9999 * np.linalg.norm(by_ids[0]) * np.linalg.norm(by_text[0])
    assert answer.json()["usage"]["prompt_tokens"] == 7


@pytest.mark.parametrize("ids", [[2, 128, 3], [2, 2**63 - 1, 3], [2, 2**32 + 10, 3], [2, -1, 3]])
def test_an_id_that_the_model_does_not_have_costs_nobody_a_worker(stack: Stack, aims: Aims, ids: list[int]) -> None:
    """An id beyond the embedding table reaches the device, where it ends the process of the model."""
    pids = [worker["pid"] for worker in stack.workers("ready", "busy")]
    found = error(ask(stack, {"input": [[5], ids]}), 400)
    assert found["param"] == "input"
    assert "input[1][" in found["message"]
    assert "127" in found["message"]
    began = time.monotonic()
    vectors(ask(stack, {"input": "t10"}))
    aims.note("an answer after a refused id", time.monotonic() - began, "s", at_most=1)
    assert [worker["pid"] for worker in stack.workers("ready", "busy")] == pids


def test_special_tokens_are_for_texts_only(stack: Stack) -> None:
    """Special tokens added to ids that have theirs already, or not, by a flag that is about texts."""
    answers = [ask(stack, {"input": [[2, 10, 3]], "add_special_tokens": flag}) for flag in (True, False)]
    assert np.array_equal(vectors(answers[0]), vectors(answers[1]))
    assert [json.loads(answer.text)["usage"]["prompt_tokens"] for answer in answers] == [3, 3]
