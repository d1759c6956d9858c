"""Answers other than embeddings are written in pieces of a bounded size, whatever is in them; and what of them is counted."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from packhorse_frontend.bodies.body import BodyMemory
from packhorse_frontend.endpoints.answers import runs, write_list
from packhorse_frontend.problems import Problem
from packhorse_frontend.schema import DetokenizeAnswer

LARGEST_PIECE_BYTES = 6 * 65_536 + 100
"""Of 65,536 characters that are six bytes each in JSON."""
LONG_TEXTS = {
    "plain": "t10 " * 100_000,
    "control characters": "\x01" * 300_000,
    "quotes": '"\\' * 150_000,
    "pairs of surrogates": "\U0001f600" * 200_000,
    "mixed": "a\u00e9\u4e2d\U0001f600\n" * 50_000,
}


def pieces(values: list[dict[str, Any]], sizes: list[int]) -> list[bytes]:
    body = write_list(DetokenizeAnswer(data=[]), "data", sizes, lambda start, end: values[start:end])
    return [body] if isinstance(body, bytes) else list(body)


@pytest.mark.parametrize("name", LONG_TEXTS)
def test_a_long_text_is_written_in_pieces(name: str) -> None:
    text = LONG_TEXTS[name]
    for values in ([{"index": 0, "document": {"text": text}}], [{"text": "a"}, {"text": text, "n": 1.5}, {"text": text}]):
        found = pieces(values, [1 if value.get("text") == "a" else len(text) for value in values])
        assert json.loads(b"".join(found)) == {"data": values}
        assert max(map(len, found)) <= LARGEST_PIECE_BYTES


def test_many_ids_of_one_text_are_written_in_pieces() -> None:
    ids = np.arange(300_000, dtype=np.int32)
    found = pieces([{"index": 0, "tokens": ids, "count": 300_000}], [300_000])
    assert json.loads(b"".join(found)) == {"data": [{"index": 0, "tokens": ids.tolist(), "count": 300_000}]}
    assert max(map(len, found)) <= LARGEST_PIECE_BYTES * 2


def test_an_element_by_itself_is_written_like_any_other() -> None:
    for value in ({}, {"a": None}, {"a": []}, {"a": np.zeros(0, np.float32)}, {"a": np.float32(0.1)}, {"\u00e9": {"b": True}}):
        plain = json.loads(b"".join(pieces([value, value], [1, 1])))["data"][0]
        assert json.loads(b"".join(pieces([value], [1])))["data"] == [plain]


def test_runs_have_every_item_once() -> None:
    assert list(runs([3, 3, 3, 20, 1], 6)) == [(0, 2), (2, 3), (3, 4), (4, 5)]
    assert list(runs([], 6)) == [(0, 0)]


def test_an_answer_that_grows_is_counted_once() -> None:
    memory = BodyMemory(1 << 20)
    with memory.share("tokens") as share:
        for values in (10, 50_000, 40_000, 100_000, 100_000):
            share.expect_answer(values)
        assert memory.held_bytes == 400_000
    assert memory.held_bytes == 0


def test_an_answer_that_never_fits_beside_its_body_is_no_matter_of_waiting() -> None:
    memory = BodyMemory(1 << 20)
    with memory.share("tokens") as share:
        share.grow(1 << 20)
        share.expect_answer((memory.max_bytes - (1 << 20)) // 4)
        with pytest.raises(Problem) as caught:
            share.expect_answer(memory.max_bytes // 4)
        assert (caught.value.status, caught.value.code, caught.value.param) == (400, "answer_too_large", "tokens")
    with memory.share("tokens") as share:
        memory.held_bytes = memory.max_bytes - 100_000
        with pytest.raises(Problem) as caught:
            share.expect_answer(50_000)
        assert caught.value.status == 503
