"""What ``packhorse bench`` sends: texts of known length, bodies of each endpoint, the user's own file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from packhorse.bench import BenchError
from packhorse.bench.bodies import Body, Recipe, bodies_of_requests, bodies_of_set, bodies_of_texts
from packhorse.bench.options import Endpoint
from packhorse.bench.own_file import read_own_file
from packhorse.bench.texts import SETS, WORDS, Texts, most_words


def lengths(name: str, longest: int, count: int = 2000) -> list[int]:
    texts = Texts(name, longest, seed=7)
    return [len(texts.text().split()) for _ in range(count)]


def fields(body: Body) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(body.content)
    return found


def recipe(endpoint: Endpoint = "embeddings", inputs: int = 1, model: str | None = "m") -> Recipe:
    return Recipe(endpoint, inputs, model, "float")


def test_sets_have_the_lengths_that_are_documented() -> None:
    assert {min(lengths("short", 500)), max(lengths("short", 500))} == {8, 16}
    assert set(lengths("bulk", 500)) == {100}
    assert min(lengths("long", 500)) == 200
    assert max(lengths("long", 500)) == 400
    mixed = sorted(lengths("mixed", 500))
    assert mixed[0] >= 3
    assert mixed[-1] == 256
    assert 37 <= mixed[len(mixed) // 2] <= 44


@pytest.mark.parametrize("name", SETS)
def test_texts_fit_into_the_model(name: str, minilm_folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(minilm_folder / "tokenizer.json"))
    tokenizer.no_truncation()
    texts = Texts(name, most_words(256), seed=7)
    tokens = [len(tokenizer.encode(texts.text()).ids) for _ in range(300)]
    assert max(tokens) <= 256
    assert max(lengths(name, most_words(64))) <= 55


def test_every_word_is_one_token_and_there_once(minilm_folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(minilm_folder / "tokenizer.json"))
    tokenizer.no_padding()
    assert len(set(WORDS)) == len(WORDS)
    assert [word for word in WORDS if len(tokenizer.encode(word, add_special_tokens=False).ids) != 1] == []


def test_a_seed_makes_the_same_texts_and_another_seed_others() -> None:
    first, again, other = (bodies_of_set(recipe(), Texts("mixed", 100, seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_bodies_of_each_endpoint() -> None:
    (embeddings, *_), (rerank, *_), (score, *_), (classify, *_) = (
        bodies_of_set(recipe(endpoint, 3), Texts("short", 50, 7)) for endpoint in ("embeddings", "rerank", "score", "classify")
    )
    assert fields(embeddings).keys() == {"model", "input", "encoding_format"}
    assert fields(rerank).keys() == {"model", "query", "documents"}
    assert fields(score).keys() == {"model", "text_1", "text_2"}
    assert fields(classify).keys() == {"model", "input"}
    for body, name in ((embeddings, "input"), (rerank, "documents"), (score, "text_2"), (classify, "input")):
        assert len(fields(body)[name]) == body.inputs == body.results == 3
    single = bodies_of_set(recipe(model=None), Texts("short", 50, 7))[0]
    assert isinstance(fields(single)["input"], str)
    assert "model" not in fields(single)


def test_a_pair_shares_the_models_limit() -> None:
    for body in bodies_of_set(recipe("rerank", 2), Texts("long", 50, 7)):
        found = fields(body)
        assert max(len(f"{found['query']} {document}".split()) for document in found["documents"]) <= 50


def test_the_pool_of_bodies_is_bounded() -> None:
    assert len(bodies_of_set(recipe(), Texts("short", 50, 7))) == 1024
    large = bodies_of_set(recipe(inputs=2000), Texts("bulk", 500, 7))
    assert 8 <= len(large) < 40


def test_own_texts(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text('"a"\n\n{"text": "b", "id": 5}\n{"input": "c"}\n')
    own = read_own_file(str(file), "embeddings")
    assert (own.texts, own.requests) == (["a", "b", "c"], [])
    assert [fields(body)["input"] for body in bodies_of_texts(recipe(inputs=2), own.texts)] == [["a", "b"], ["c", "a"]]
    (pair,) = bodies_of_texts(recipe("rerank", 2), own.texts)
    assert fields(pair) == {"model": "m", "query": "a", "documents": ["b", "c"]}


def test_own_requests_are_sent_as_they_are(tmp_path: Path) -> None:
    requests = [{"input": ["a", "b"], "dimensions": 64}, {"input": [5, 6], "model": "other"}, {"input": "c", "priority": 1}]
    file = tmp_path / "own.jsonl"
    file.write_text("\n".join(map(json.dumps, requests)))
    bodies = bodies_of_requests(recipe(), read_own_file(str(file), "embeddings").requests)
    assert [fields(body) for body in bodies] == [{"model": "m", **request} for request in requests]
    assert [body.inputs for body in bodies] == [2, 1, 1]


def test_top_n_says_how_many_results_there_are() -> None:
    requests = [{"query": "q", "documents": ["a", "b", "c"], **more} for more in ({}, {"top_n": 2}, {"top_n": 0}, {"top_n": 9})]
    bodies = bodies_of_requests(recipe("rerank"), requests)
    assert [(body.inputs, body.results) for body in bodies] == [(3, 3), (3, 2), (3, 3), (3, 3)]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'"a"\n{"text": \n', "line 2 of .* is no JSON"),
        (b"17\n", "line 1 of .* is int, not a string or an object"),
        (b'{"id": 1}\n', "line 1 of .* has no input, so it is no request to embeddings"),
        (b'"a"\n{"input": ["b"]}\n', "line 2 of .* is of another kind"),
        (b"\n\n", "has no texts"),
        (b'"\xff"\n', "line 1 of .* is no JSON"),
    ],
)
def test_mistakes_in_the_file_name_its_line(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "own.jsonl"
    file.write_bytes(content)
    with pytest.raises(BenchError, match=words):
        read_own_file(str(file), "embeddings")


def test_no_such_file_lists_the_sets() -> None:
    with pytest.raises(BenchError, match="cannot read shrot: No such file or directory; give a file, or short, mixed"):
        read_own_file("shrot", "embeddings")
