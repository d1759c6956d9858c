"""Answers from float32 rows: exact, short, the same bits in both formats; and shortened vectors."""

from __future__ import annotations

import base64
import json

import msgspec
import numpy as np
import pytest

from edges.fake_broker import MODEL
from packhorse_frontend.endpoints.dimensions import check_dimensions, shorten
from packhorse_frontend.endpoints.render import count_values, pieces_of, render_embeddings
from packhorse_frontend.problems import Problem
from packhorse_frontend.schema import EmbeddingsAnswer, EmbeddingsRequest, Usage

USAGE = Usage(prompt_tokens=3, total_tokens=3)
ODD = np.array(
    [
        0.0,
        -0.0,
        1e10,
        1e-10,
        1e-45,
        1.17549435e-38,
        3.4028235e38,
        16777216,
        0.1,
        1 / 3,
        123456.0,
        -1.5,
        9.999999e-5,
        1e16,
        1e21,
        5e-7,
    ],
    dtype=np.float32,
)


def render(rows: np.ndarray, encoding_format: str = "float", dimension: int | None = None) -> bytes:
    return render_embeddings(rows, dimension or rows.shape[1], encoding_format, 'm"ü', USAGE)  # type: ignore[arg-type]


def bits(body: bytes) -> np.ndarray:
    found = [item["embedding"] for item in json.loads(body)["data"]]
    if isinstance(found[0], str):
        return np.array([np.frombuffer(base64.b64decode(each), "<u4") for each in found])
    return np.array(found, dtype=np.float64).astype(np.float32).view(np.uint32)


def test_every_float32_is_read_back_exactly() -> None:
    """The odd ones, and 200,000 of all magnitudes, subnormal ones among them."""
    drawn = np.random.default_rng(7).integers(0, 2**32, 400_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    drawn = drawn[np.isfinite(drawn)][:199_984]
    subnormal = np.random.default_rng(8).integers(1, 2**23, 16_000).astype(np.uint32).view(np.float32)
    rows = np.concatenate([ODD, drawn, subnormal]).reshape(-1, 16)
    for encoding_format in ("float", "base64"):
        assert np.array_equal(bits(render(rows, encoding_format)), rows.view(np.uint32))


def test_floats_are_short() -> None:
    rows = np.random.default_rng(7).standard_normal((32, 1024)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    assert len(render(rows)) <= 14 * rows.size


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (100, 1024), (2, 40_000)])
def test_an_answer_is_what_its_type_says(shape: tuple[int, int], encoding_format: str) -> None:
    rows = np.random.default_rng(7).standard_normal(shape).astype(np.float32)
    answer = msgspec.json.decode(render(rows, encoding_format), type=EmbeddingsAnswer)
    assert [item.index for item in answer.data] == list(range(shape[0]))
    assert answer.model == 'm"ü'
    assert answer.usage == USAGE
    assert "truncated_inputs" not in json.loads(render(rows))["usage"]


def test_rows_that_are_a_view_are_rendered_as_they_look() -> None:
    rows = np.random.default_rng(7).standard_normal((4, 16)).astype(np.float32)
    assert render(rows[::2]) == render(rows[::2].copy())
    assert render(np.asfortranarray(rows), "base64") == render(rows, "base64")


@pytest.mark.parametrize("sizes", [(2,), (4, 2, 6), (2, 70_000, 4, 4), (30_000, 30_000, 2)])
def test_rows_of_several_sizes_are_rendered_each_as_it_is(sizes: tuple[int, ...]) -> None:
    rows = [np.random.default_rng(size).standard_normal(size).astype(np.float32) for size in sizes]
    assert count_values(rows) == sum(sizes)
    floats, packed = (json.loads(render_embeddings(rows, 2, form, "m", USAGE))["data"] for form in ("float", "base64"))
    assert [item["index"] for item in floats] == [item["index"] for item in packed] == list(range(len(sizes)))
    for row, as_floats, as_text in zip(rows, floats, packed, strict=True):
        assert np.array_equal(np.array(as_floats["embedding"], dtype=np.float32), row)
        assert np.array_equal(np.frombuffer(base64.b64decode(as_text["embedding"]), "<f4"), row)


def test_a_shortened_vector_has_length_one_in_float32() -> None:
    rows = np.random.default_rng(7).standard_normal((5, 32)).astype(np.float32)
    rows[1, :8] = 0
    rows[2] *= np.float32(1e30)
    rows[3] *= np.float32(1e-30)
    short = shorten(rows, 8)
    assert (short.dtype, short.shape) == (np.float32, (5, 8))
    assert np.allclose(np.linalg.norm(short[[0, 2, 3, 4]], axis=1), 1, atol=1e-6)
    assert not short[1].any()
    expected = rows[0, :8] / np.linalg.norm(rows[0, :8])
    assert np.allclose(short[0], expected, atol=1e-6)
    assert shorten(rows, 32) is rows


def test_which_dimensions_a_model_accepts() -> None:
    exact = MODEL
    some = msgspec.structs.replace(MODEL, matryoshka_dimensions=(8, 64))
    every = msgspec.structs.replace(MODEL, matryoshka_any=True)
    assert [check_dimensions(value, exact, "m") for value in (None, 32)] == [32, 32]
    assert check_dimensions(8, some, "m") == 8
    assert check_dimensions(1, every, "m") == 1
    for value, model in ((8, exact), (33, exact), (64, some), (16, some), (33, every)):
        with pytest.raises(Problem, match="model m accepts") as caught:
            check_dimensions(value, model, "m")
        assert (caught.value.status, caught.value.param) == (400, "dimensions")


@pytest.mark.parametrize("task", ["classify", "reward", "rerank"])
def test_logits_have_one_size_only(task: str) -> None:
    model = msgspec.structs.replace(MODEL, task=task, dimension=3)
    assert [check_dimensions(value, model, "m") for value in (None, 3)] == [3, 3]
    with pytest.raises(Problem, match="model m accepts only 3") as caught:
        check_dimensions(2, model, "m")
    assert (caught.value.status, caught.value.param) == (400, "dimensions")


@pytest.mark.parametrize("value", [1, 2, 8])
def test_a_model_with_values_for_each_token_has_no_size_to_ask_for(value: int) -> None:
    model = msgspec.structs.replace(MODEL, task="token_reward", dimension=2)
    assert check_dimensions(None, model, "m") == 2
    with pytest.raises(Problem, match="model m gives 2 values for each token") as caught:
        check_dimensions(value, model, "m")
    assert (caught.value.status, caught.value.param) == (400, "dimensions")


def test_the_types_describe_the_api() -> None:
    schema = msgspec.json.schema(EmbeddingsRequest)
    properties = schema["$defs"]["EmbeddingsRequest"]["properties"]
    assert {"input", "model", "dimensions", "truncate_prompt_tokens", "priority"} <= properties.keys()
    assert "required" not in schema["$defs"]["EmbeddingsRequest"] or not schema["$defs"]["EmbeddingsRequest"]["required"]
    assert msgspec.json.schema(EmbeddingsAnswer)["$defs"]["Usage"]["required"] == ["prompt_tokens", "total_tokens"]


@pytest.mark.parametrize("size", [32_768, 32_769, 100_001])
def test_a_long_row_is_written_in_pieces(size: int) -> None:
    """One call of the serializer holds the interpreter: no row, however long, may stop the event loop."""
    rows = [np.arange(3, dtype=np.float32), np.linspace(-1, 1, size, dtype=np.float32), np.ones(2, np.float32)]
    for form in ("float", "base64"):
        pieces = list(pieces_of(rows, 1, form, "m", USAGE))
        assert max(map(len, pieces)) < 500_000
        whole = b"".join(pieces)
        assert whole == render_embeddings(rows, 1, form, "m", USAGE)
        for index, (item, row) in enumerate(zip(json.loads(whole)["data"], rows, strict=True)):
            assert item["index"] == index
            value = item["embedding"]
            found = np.frombuffer(base64.b64decode(value), "<f4") if form == "base64" else np.array(value, np.float32)
            assert np.array_equal(found, row)
