"""The first request, and the longest one: a decoder that pools its last token is served at both ends of its limit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from aims import Aims
from edges.test_http_embeddings import error, vectors
from reports.asking import ask
from stack import Stack
from tiny_models import build_l

pytestmark = pytest.mark.process

LIMIT = 128
EOS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_l(tmp_path_factory.mktemp("models") / "l")


@pytest.fixture(scope="module")
def fresh(model: Path) -> Iterator[Stack]:
    """A server that no request has reached."""
    running = Stack(model=model)
    try:
        yield running.start().wait_ready()
    finally:
        running.clean()


@pytest.mark.parametrize("words", [LIMIT - 1, 1])
def test_the_first_request_is_as_quick_as_the_next(fresh: Stack, aims: Aims, words: int) -> None:
    """The first request, or the first of a new length, takes seconds, because nothing of that size ran before."""
    took = []
    for _ in range(12):
        began = time.monotonic()
        vectors(ask(fresh, {"input": "t10 " * words}))
        took.append(time.monotonic() - began)
    aims.note(f"the first request of {words} words", took[0] / median(took[1:]), "times the median", at_most=3)


@pytest.mark.parametrize(("tokens", "status"), [(LIMIT - 1, 200), (LIMIT, 200), (LIMIT + 1, 400)])
def test_the_end_token_is_pooled_up_to_the_limit(fresh: Stack, model: Path, tokens: int, status: int) -> None:
    """A text at the limit loses its end token to truncation, and the vector is read off another one."""
    words = [10 + number % 100 for number in range(tokens - 1)]
    answer = ask(fresh, {"input": " ".join(f"t{word}" for word in words)})
    if status == 400:
        assert str(LIMIT) in error(answer, 400)["message"]
        return
    assert answer.json()["usage"]["prompt_tokens"] == tokens
    assert np.abs(vectors(answer)[0] - last_state(model, [*words, EOS])).max() <= 1e-5


def test_an_end_token_survives_truncation_that_was_asked_for(fresh: Stack, model: Path) -> None:
    """The same where the caller wants the text cut."""
    answer = ask(fresh, {"input": "t10 " * 300, "truncate_prompt_tokens": -1})
    assert answer.json()["usage"]["truncated_inputs"] == 1
    assert np.abs(vectors(answer)[0] - last_state(model, [10] * (LIMIT - 1) + [EOS])).max() <= 1e-5


def last_state(model: Path, ids: list[int]) -> np.ndarray:
    """The last token's hidden state of a plain forward, of length 1."""
    import torch
    from transformers import AutoModel

    loaded = AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode():
        state = loaded(input_ids=torch.tensor([ids])).last_hidden_state[0, -1].numpy()
    return np.asarray(state / np.linalg.norm(state))
