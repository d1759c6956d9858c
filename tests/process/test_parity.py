"""The vectors that come over HTTP are the ones that sentence-transformers computes, one text at a time."""

from __future__ import annotations

import base64
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from stack import Stack
from texts import mixed_texts

# The reference encodes 200 texts one at a time, and a busy machine takes its time for that.
pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

TEXTS = mixed_texts(200, longest=256)
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def reference(minilm_folder: Path) -> np.ndarray:
    """[200, 384] float32: sentence-transformers' own encode, one text at a time."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(minilm_folder), device="cpu")
    return np.stack([model.encode(text, show_progress_bar=False) for text in TEXTS])


def embed(http: httpx.Client, stack: Stack, texts: str | list[str], **fields: Any) -> list[Any]:
    answer = http.post(f"{stack.url}/v1/embeddings", json={"input": texts, **fields})
    assert answer.status_code == 200, answer.text
    return [item["embedding"] for item in answer.json()["data"]]


def decode(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype="<f4")


def test_one_by_one(minilm_stack: Stack, reference: np.ndarray) -> None:
    with httpx.Client(timeout=60) as http:
        vectors = np.array([embed(http, minilm_stack, text)[0] for text in TEXTS], dtype=np.float32)
    assert np.abs(vectors - reference).max() <= TOLERANCE


def test_in_one_list(minilm_stack: Stack, reference: np.ndarray) -> None:
    with httpx.Client(timeout=60) as http:
        vectors = np.array(embed(http, minilm_stack, TEXTS), dtype=np.float32)
    assert vectors.shape == reference.shape
    assert np.abs(vectors - reference).max() <= TOLERANCE


def test_from_32_connections_at_once(minilm_stack: Stack, reference: np.ndarray) -> None:
    barrier = threading.Barrier(32)

    def client(start: int) -> float:
        """Every 32nd text, on a connection of its own; the largest difference seen."""
        barrier.wait(timeout=30)
        with httpx.Client(timeout=60) as http:
            return max(
                float(np.abs(np.float32(embed(http, minilm_stack, TEXTS[index])[0]) - reference[index]).max())
                for index in range(start, len(TEXTS), 32)
            )

    with ThreadPoolExecutor(32) as pool:
        assert max(pool.map(client, range(32))) <= TOLERANCE


def test_base64_and_float_are_the_same_bits(minilm_stack: Stack) -> None:
    """Both encodings of one text sent alone: the forward is the same, so the numbers must be, to the bit."""
    with httpx.Client(timeout=60) as http:
        for text in TEXTS[:20]:
            floats = embed(http, minilm_stack, text, encoding_format="float")[0]
            packed = decode(embed(http, minilm_stack, text, encoding_format="base64")[0])
            assert np.array(floats, dtype=np.float32).tobytes() == packed.tobytes()
