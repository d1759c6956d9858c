"""The rules of requests that their types cannot say, as JSON Schema: what depends on the model, and the forms of inputs.

The parser refuses what breaks them in its own words (``inputs.py`` and its neighbours). Before a worker is ready the model's
rules are not known, and left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from packhorse_shared.messages import ModelFacts

Schema = dict[str, Any]


@dataclass(frozen=True)
class Served:
    """What the description of the API depends on."""

    names: tuple[str, ...]
    """Every name the API answers to."""
    max_inputs: int
    root_path: str
    needs_key: bool
    model: ModelFacts | None
    longest_input: int | None
    """Tokens that one input may have. None, as ``model``, before a worker was ready."""


def tighten(schema: Schema, kind: str, served: Served) -> None:
    """Put the rules into the schema of a request."""
    for name, rule in _RULES[kind].items():
        rule(schema["properties"][name], served)


def require(schema: Schema, fields: tuple[str, ...]) -> None:
    """Say that these fields of a request must be there, and no other. null is refused in them, as if they were absent.

    That null is every other field's default is not said: generators of clients take a field with a default for one that
    must be sent.
    """
    schema["required"] = list(fields)
    for found in schema["properties"].values():
        found.pop("default", None)
    for name in fields:
        found = schema["properties"][name]
        kinds = [kind for kind in found.pop("anyOf") if kind != {"type": "null"}]
        found.update(kinds[0] if len(kinds) == 1 else {"anyOf": kinds})


def _values(found: Schema) -> list[Schema]:
    """The kinds of value that a field takes, besides null."""
    return [kind for kind in found["anyOf"] if kind != {"type": "null"}] if "anyOf" in found else [found]


def _name(found: Schema, served: Served) -> None:
    _values(found)[0]["enum"] = list(served.names)
    found["examples"] = [served.names[0]]


def _token_ids(served: Served) -> Schema:
    ids: Schema = {"type": "integer", "minimum": 0}
    if served.model is not None:
        ids["maximum"] = served.model.vocabulary_rows - 1
    return {"type": "array", "items": ids, "minItems": 1}


def _listed(items: Schema, served: Served) -> Schema:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": served.max_inputs}


def _inputs(found: Schema, served: Served) -> None:
    """A list holds texts, ids or lists of ids, never a mixture: its type has to take all three."""
    ids = _token_ids(served)
    found["anyOf"] = [
        {"title": "a text", "type": "string"},
        {"title": "texts", **_listed({"type": "string"}, served)},
        {"title": "token ids", **ids},
        {"title": "lists of token ids", **_listed(ids, served)},
    ]
    if served.longest_input is not None:
        found["description"] += f". Longest input: {served.longest_input} tokens"


def _id_lists(found: Schema, served: Served) -> None:
    ids = _token_ids(served)
    found["anyOf"] = [{"title": "token ids", **ids}, {"title": "lists of token ids", **_listed(ids, served)}]


def _texts(found: Schema, served: Served) -> None:
    for kind in _values(found):
        if kind.get("type") == "array":
            kind.update(minItems=1, maxItems=served.max_inputs)


def _not_empty(found: Schema, _served: Served) -> None:
    _values(found)[0]["minLength"] = 1


def _at_least_one(found: Schema, _served: Served) -> None:
    _values(found)[0]["minimum"] = 1


def _truncate(found: Schema, _served: Served) -> None:
    _values(found)[0]["not"] = {"const": 0}


def _dimensions(found: Schema, served: Served) -> None:
    model = served.model
    if model is None:
        return
    if model.task == "token_reward":
        found["anyOf"] = [{"type": "null"}]
    elif model.matryoshka_any:
        _values(found)[0]["maximum"] = model.dimension
    else:
        smaller = {size for size in model.matryoshka_dimensions if size < model.dimension}
        _values(found)[0]["enum"] = sorted({*smaller, model.dimension})


def _prompt_name(found: Schema, served: Served) -> None:
    if served.model is None:
        return
    if served.model.prompts:
        _values(found)[0]["enum"] = sorted(served.model.prompts)
    else:
        found["anyOf"] = [{"type": "null"}]
        found["description"] += "; this model has none"


_Rules = Mapping[str, Callable[[Schema, Served], None]]
_RERANK: _Rules = {"model": _name, "query": _not_empty, "documents": _texts, "prompt_name": _prompt_name}
_RULES: Mapping[str, _Rules] = {
    "EmbeddingsRequest": {
        "model": _name,
        "input": _inputs,
        "dimensions": _dimensions,
        "truncate_prompt_tokens": _truncate,
        "prompt_name": _prompt_name,
    },
    "RerankRequest": _RERANK,
    "RerankRequestV2": {**_RERANK, "top_n": _at_least_one},
    "ScoreRequest": {
        "model": _name,
        "text_1": _texts,
        "text_2": _texts,
        "truncate_prompt_tokens": _truncate,
        "prompt_name": _prompt_name,
    },
    "ClassifyRequest": {"model": _name, "input": _inputs, "truncate_prompt_tokens": _truncate},
    "TokenizeRequest": {"model": _name, "input": _texts},
    "DetokenizeRequest": {"model": _name, "tokens": _id_lists},
}
