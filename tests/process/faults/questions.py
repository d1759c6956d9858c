"""Requests made beforehand, each with what its answer must be."""

from __future__ import annotations

import base64
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx
import numpy as np
import orjson
from numpy.typing import NDArray

from standin import row_of

CLS, SEP = 2, 3
HARMLESS = range(10, 90)
"""Ids of which random texts are made; those from 90 to 127 are for traps."""


@dataclass(frozen=True, eq=False)
class Question:
    """One HTTP request as bytes."""

    wire: bytes
    rows: NDArray[np.float32]
    """What its vectors must be, one row for each input."""
    tolerance: float = 0.0
    """How far a value may be off; 0 demands the very same bits."""

    @property
    def inputs(self) -> int:
        return len(self.rows)

    def is_answered_by(self, body: bytes) -> bool:
        """Whether the body of a 200 holds exactly the vectors of this question, in order."""
        try:
            data = orjson.loads(body)["data"]
            if [each["index"] for each in data] != list(range(self.inputs)):
                return False
            rows = np.stack([_values(each["embedding"]) for each in data])
        except (ValueError, KeyError, TypeError, IndexError):
            return False
        if rows.shape != self.rows.shape:
            return False
        return bool(
            np.array_equal(rows, self.rows) if self.tolerance == 0 else np.allclose(rows, self.rows, atol=self.tolerance)
        )


def ask(texts: Sequence[str], *, is_base64: bool = False, fields: dict[str, Any] | None = None) -> Question:
    """A request of these texts ("t10 t11"); ``fields`` go into its body as they are. Its rows are the stand-in's."""
    body: dict[str, Any] = {"input": list(texts) if len(texts) > 1 else texts[0], **(fields or {})}
    if is_base64:
        body["encoding_format"] = "base64"
    return Question(http_request(orjson.dumps(body)), np.stack([row_of(ids_of(text)) for text in texts]))


def random_questions(
    seed: int, count: int = 256, *, inputs: int = 1, longest: int = 30, fields: dict[str, Any] | None = None
) -> list[Question]:
    """``count`` requests of ``inputs`` random texts of 1 to ``longest`` words each, half of them in base64."""
    source = random.Random(seed)
    return [
        ask([random_text(source, longest) for _ in range(inputs)], is_base64=source.random() < 0.5, fields=fields)
        for _ in range(count)
    ]


def random_text(source: random.Random, longest: int = 30) -> str:
    return " ".join(f"t{source.choice(HARMLESS)}" for _ in range(source.randint(1, longest)))


def ids_of(text: str) -> list[int]:
    """What the tokenizer of the tiny model makes of a text."""
    return [CLS, *(int(word[1:]) for word in text.split()), SEP]


def http_request(body: bytes, *, path: str = "/v1/embeddings", headers: Iterable[str] = ()) -> bytes:
    """A POST of JSON as HTTP/1.1 on a connection that is kept."""
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", f"content-length: {len(body)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode("ascii") + body


def learn(url: str, questions: Sequence[Question], tolerance: float = 1e-4) -> list[Question]:
    """The same questions with the rows of a real model, as it answers now, undisturbed and one question at a time."""
    learned = []
    with httpx.Client(timeout=30) as http:
        for question in questions:
            answer = http.post(
                f"{url}/v1/embeddings",
                content=question.wire.partition(b"\r\n\r\n")[2],
                headers={"content-type": "application/json"},
            )
            assert answer.status_code == 200, answer.text
            rows = np.stack([_values(each["embedding"]) for each in answer.json()["data"]])
            learned.append(replace(question, rows=rows, tolerance=tolerance))
    return learned


def _values(embedding: str | list[float]) -> NDArray[np.float32]:
    if isinstance(embedding, str):
        return np.frombuffer(base64.b64decode(embedding, validate=True), dtype="<f4")
    return np.array(embedding, dtype=np.float32)
