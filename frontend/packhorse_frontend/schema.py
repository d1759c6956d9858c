"""The bodies of requests and answers, and the rules of their fields.

One set of types validates requests and describes the API (``msgspec.json.schema``). Unknown fields are ignored, since clients
and gateways add them; null means absent; a known field of a wrong type is refused by its name.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

# A list may hold each of these, but all of one kind; `inputs.py` sees to that, and says which element is the odd one.
InputElement = str | int | list[int]


class EmbeddingsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /v1/embeddings."""

    model: Annotated[str | None, Meta(description="one of the served names; the served model when absent")] = None
    input: Annotated[
        str | list[InputElement] | None,
        Meta(description="text, list of texts, token ids of one input, or list of token id lists; ids are used as they are"),
    ] = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None, Meta(description="base64 packs little-endian float32; float by default")
    ] = None
    dimensions: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="shorter vectors from a Matryoshka model, else exactly the model's own size"),
    ] = None
    add_special_tokens: Annotated[bool | None, Meta(description="true by default; has no effect on token ids")] = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1)] | None,
        Meta(description="null refuses inputs that are too long, -1 cuts them to the model's limit, n to n tokens"),
    ] = None
    prompt_name: Annotated[str | None, Meta(description="name of one of the model's own prompts")] = None
    prompt: Annotated[str | None, Meta(description="text put before every input")] = None
    input_type: Annotated[
        str | None, Meta(description="query or document: picks the model's matching prompt, where it has one")
    ] = None
    priority: Annotated[Annotated[int, Meta(ge=-100, le=100)] | None, Meta(description="lower runs first; 0 by default")] = None
    user: Annotated[str | None, Meta(description="accepted and ignored")] = None


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens of a request. ``truncated_inputs`` stands only where truncation was asked for."""

    prompt_tokens: int
    total_tokens: int
    truncated_inputs: int | msgspec.UnsetType = msgspec.UNSET


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """One vector: numbers, or base64 of little-endian float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of POST /v1/embeddings. Written by ``render.py`` straight from the float32 rows; this type describes it."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: Usage


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One served name. What the model is like is null until a worker has loaded it."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "packhorse"
    dimension: int | None
    max_seq_len: int | None
    task: str | None


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Healthy(msgspec.Struct, frozen=True):
    """Answer of GET /health and GET /live."""

    status: Literal["ok"] = "ok"
