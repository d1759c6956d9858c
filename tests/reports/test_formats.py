"""What an answer looks like, to clients that take the API at its word, and what is never in one."""

from __future__ import annotations

import base64
import math
import re

import numpy as np
import pytest
from openai.types import CreateEmbeddingResponse

from edges.test_http_embeddings import error, vectors
from harm import log_of
from reports.asking import ask
from stack import Stack
from tiny_models import HIDDEN
from waiting import wait_until

pytestmark = pytest.mark.process


@pytest.mark.parametrize("count", [1, 5])
def test_the_shape_that_a_strict_client_validates(stack: Stack, count: int) -> None:
    """A missing index, a null model, a usage of nothing: whoever validates answers refuses them."""
    answer = ask(stack, {"input": ["t10 t11"] * count})
    body = answer.json()
    parsed = CreateEmbeddingResponse.model_validate_json(answer.text, strict=True)
    assert (parsed.object, parsed.model, len(parsed.data)) == ("list", "plain", count)
    assert [(item.object, item.index) for item in parsed.data] == [("embedding", index) for index in range(count)]
    assert parsed.usage.prompt_tokens == parsed.usage.total_tokens == 4 * count
    assert body.keys() == {"object", "data", "model", "usage"}
    assert all(type(item["index"]) is int for item in body["data"])
    assert body["usage"].keys() == {"prompt_tokens", "total_tokens"}


def test_the_encoding_that_was_asked_for(stack: Stack) -> None:
    """Base64 refused, or ignored: a client that asked for it reads a list of floats as a quarter of the dimensions."""
    plain = ask(stack, {"input": "t10"}).json()["data"][0]["embedding"]
    assert plain == ask(stack, {"input": "t10", "encoding_format": "float"}).json()["data"][0]["embedding"]
    assert len(plain) == HIDDEN
    packed = ask(stack, {"input": "t10", "encoding_format": "base64"}).json()["data"][0]["embedding"]
    assert isinstance(packed, str)
    raw = base64.b64decode(packed, validate=True)
    assert len(raw) == 4 * HIDDEN
    assert np.abs(np.frombuffer(raw, "<f4") - np.float32(plain)).max() <= 1e-6
    with stack.client(max_retries=0) as client:
        for options in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
            answer = client.embeddings.create(model="plain", input="t10", **options)
            found = answer.data[0].embedding
            values = np.frombuffer(base64.b64decode(found), "<f4") if isinstance(found, str) else found
            assert len(values) == HIDDEN


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
def test_what_is_no_number_never_leaves(stack: Stack, encoding_format: str) -> None:
    """Vectors of NaN answered as null, as text that is no JSON, or as a crash; and kept by clients that cache."""
    answer = ask(stack, {"input": "t99", "encoding_format": encoding_format})
    found = error(answer, 500)
    assert found["code"] == "non_finite_output"
    assert "data" not in answer.json()
    assert "nan" not in answer.text.lower().replace(found["message"].lower(), "")
    sound = vectors(ask(stack, {"input": "t10"}))
    assert all(math.isfinite(value) for value in sound[0])
    logged = wait_until(lambda: re.search("code=non_finite_output.*", log_of(stack, "worker-0")), what="it in the log")
    assert "model=plain dtype=float32" in logged[0]
