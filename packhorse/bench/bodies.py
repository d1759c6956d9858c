"""Request bodies, made before the first is sent: while the load runs, sending costs no more than the HTTP.

A fixed number of different bodies is sent in turn, so memory does not grow with the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from packhorse.bench.options import EncodingFormat, Endpoint
from packhorse.bench.texts import Texts

_MOST_BODIES, _FEWEST_BODIES = 1024, 8
_POOL_BYTES = 16 << 20
_SPECIAL_TOKENS_OF_A_PAIR = 2
"""More than a single text has."""

INPUT_FIELDS: dict[Endpoint, tuple[str, ...]] = {
    "embeddings": ("input",),
    "classify": ("input",),
    "rerank": ("query", "documents"),
    "score": ("text_1", "text_2"),
}
"""Fields without which a request of the endpoint is none."""


class Body(msgspec.Struct, frozen=True):
    """One request, ready to be sent."""

    content: bytes
    inputs: int
    """Texts, documents or pairs in it."""
    results: int
    """How many an answer must have."""


class Recipe(msgspec.Struct, frozen=True):
    """What all bodies of a run have in common."""

    endpoint: Endpoint
    inputs: int
    """In each request."""
    model: str | None
    """None leaves the field out."""
    encoding_format: EncodingFormat

    @property
    def is_pair(self) -> bool:
        """Whether an input is a query and a text."""
        return self.endpoint in ("rerank", "score")


def bodies_of_set(recipe: Recipe, texts: Texts) -> list[Body]:
    """Bodies from a set of texts."""
    made: list[Body] = []
    size = 0
    while len(made) < _FEWEST_BODIES or (size < _POOL_BYTES and len(made) < _MOST_BODIES):
        query = texts.query() if recipe.is_pair else ""
        room = len(query.split()) + _SPECIAL_TOKENS_OF_A_PAIR if query else 0
        made.append(_body(recipe, _fields(recipe, [texts.text(room) for _ in range(recipe.inputs)], query)))
        size += len(made[-1].content)
    return made


def bodies_of_texts(recipe: Recipe, texts: Sequence[str]) -> list[Body]:
    """Bodies from the user's own texts, in their order; the last one is filled up with the first texts. Each request of pairs
    takes one text more, in front: the query."""
    count = recipe.inputs + recipe.is_pair
    made = []
    for start in range(0, len(texts), count):
        taken = [texts[index % len(texts)] for index in range(start, start + count)]
        query = taken.pop(0) if recipe.is_pair else ""
        made.append(_body(recipe, _fields(recipe, taken, query)))
    return made


def bodies_of_requests(recipe: Recipe, requests: Sequence[Mapping[str, Any]]) -> list[Body]:
    """The user's own requests as they are; only ``model`` is put into those without one."""
    return [_body(recipe, {"model": recipe.model, **request} if recipe.model else request) for request in requests]


def _fields(recipe: Recipe, texts: list[str], query: str) -> dict[str, Any]:
    fields: dict[str, Any] = {} if recipe.model is None else {"model": recipe.model}
    if recipe.endpoint == "rerank":
        return fields | {"query": query, "documents": texts}
    if recipe.endpoint == "score":
        return fields | {"text_1": query, "text_2": texts}
    fields["input"] = texts[0] if len(texts) == 1 else texts
    return fields | ({"encoding_format": recipe.encoding_format} if recipe.endpoint == "embeddings" else {})


def _body(recipe: Recipe, fields: Mapping[str, Any]) -> Body:
    counts = [_count(fields[name]) for name in INPUT_FIELDS[recipe.endpoint]]
    inputs = results = max(counts)
    top_n = fields.get("top_n")
    if recipe.endpoint == "rerank" and isinstance(top_n, int):
        results = min(inputs, top_n) if top_n > 0 else inputs
    return Body(msgspec.json.encode(fields), inputs, results)


def _count(value: Any) -> int:
    """Inputs in one field: a text or a list of token ids is one."""
    return len(value) if isinstance(value, list) and value and not isinstance(value[0], int) else 1
