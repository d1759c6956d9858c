"""The bodies of requests and answers, and the rules of their fields.

One set of types validates requests and describes the API (``api/``). Unknown fields are ignored, since clients
and gateways add them; null means absent; a known field of a wrong type is refused by its name.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

# A list may hold each of these, but all of one kind; `inputs.py` sees to that, and says which element is the odd one.
InputElement = str | int | list[int]

Model = Annotated[str | None, Meta(description="one of the served names; the served model when absent")]
Input = Annotated[
    str | list[InputElement] | None,
    Meta(description="text, list of texts, token ids of one input, or list of token id lists; ids are used as they are"),
]
SpecialTokens = Annotated[bool | None, Meta(description="true by default; has no effect on token ids")]
Truncate = Annotated[
    Annotated[int, Meta(ge=-1)] | None,
    Meta(description="null refuses inputs that are too long, -1 cuts them to the model's limit, n to n tokens"),
]
PromptName = Annotated[str | None, Meta(description="name of one of the model's own prompts")]
Prompt = Annotated[str | None, Meta(description="text put before every input")]
PairPrompt = Annotated[str | None, Meta(description="instruction put before the query")]
Priority = Annotated[Annotated[int, Meta(ge=-100, le=100)] | None, Meta(description="lower runs first; 0 by default")]
User = Annotated[str | None, Meta(description="accepted and ignored")]


class EmbeddingsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /v1/embeddings."""

    model: Model = None
    input: Input = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None, Meta(description="base64 packs little-endian float32; float by default")
    ] = None
    dimensions: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="shorter vectors from a Matryoshka model, else exactly the model's own size"),
    ] = None
    add_special_tokens: SpecialTokens = None
    truncate_prompt_tokens: Truncate = None
    prompt_name: PromptName = None
    prompt: Prompt = None
    input_type: Annotated[
        str | None, Meta(description="query or document: picks the model's matching prompt, where it has one")
    ] = None
    priority: Priority = None
    user: User = None


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """A document that came as an object; fields besides ``text`` are ignored."""

    text: str


class RerankRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /v1/rerank, /v2/rerank and /rerank."""

    model: Model = None
    query: Annotated[str | None, Meta(description="what the documents are ranked for")] = None
    documents: Annotated[
        list[str | Document] | None, Meta(description='texts, or objects {"text": ...}; one that is too long is cut')
    ] = None
    top_n: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="so many results, the best; all when absent. 0 also means all, except in /v2/rerank, which refuses it"
        ),
    ] = None
    return_documents: Annotated[
        bool | None, Meta(description="whether results carry their document's text; false by default")
    ] = None
    max_tokens_per_doc: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="cut each document to so many tokens of its own")
    ] = None
    prompt_name: PromptName = None
    prompt: PairPrompt = None
    priority: Annotated[
        Annotated[int, Meta(ge=-100, le=999)] | None,
        Meta(description="lower runs first; 0 by default. Cohere's range goes to 999; above 100 it counts as 100"),
    ] = None


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /v1/score."""

    model: Model = None
    text_1: Annotated[str | list[str] | None, Meta(description="a text, or as many as text_2 has")] = None
    text_2: Annotated[str | list[str] | None, Meta(description="the texts to be scored, each with its text_1")] = None
    truncate_prompt_tokens: Truncate = None
    prompt_name: PromptName = None
    prompt: PairPrompt = None
    priority: Priority = None
    user: User = None


class ClassifyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /v1/classify."""

    model: Model = None
    input: Input = None
    add_special_tokens: SpecialTokens = None
    truncate_prompt_tokens: Truncate = None
    priority: Priority = None
    user: User = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /tokenize."""

    model: Model = None
    input: Annotated[str | list[str] | None, Meta(description="a text, or a list of texts")] = None
    add_special_tokens: Annotated[bool | None, Meta(description="true by default")] = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /detokenize."""

    model: Model = None
    tokens: Annotated[
        list[int | list[int]] | None, Meta(description="the ids of one text, or a list with those of several")
    ] = None
    skip_special_tokens: Annotated[bool | None, Meta(description="leave special tokens out of the text; false by default")] = (
        None
    )


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


class RerankResult(msgspec.Struct, frozen=True, kw_only=True):
    """One document's place: results come best first."""

    index: Annotated[int, Meta(description="the document's place in the request, from 0")]
    relevance_score: float
    document: Document | msgspec.UnsetType = msgspec.UNSET


class ApiVersion(msgspec.Struct, frozen=True, kw_only=True):
    """Which of Cohere's shapes an answer has."""

    version: str


class BilledUnits(msgspec.Struct, frozen=True, kw_only=True):
    """What Cohere would count: a search for every hundred documents, begun ones included."""

    search_units: int


class RerankTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of all pairs."""

    input_tokens: int
    output_tokens: int = 0


class RerankMeta(msgspec.Struct, frozen=True, kw_only=True):
    """What Cohere's clients look for beside the results. ``warnings`` stands only where there are some."""

    api_version: ApiVersion
    billed_units: BilledUnits
    tokens: RerankTokens
    warnings: list[str] | msgspec.UnsetType = msgspec.UNSET


class RerankAnswerV2(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of POST /v2/rerank."""

    id: str
    results: list[RerankResult]
    meta: RerankMeta


class RerankAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of POST /v1/rerank and /rerank: what Cohere's v1 and Jina's clients read."""

    id: str
    object: Literal["list"] = "list"
    model: str
    results: list[RerankResult]
    meta: RerankMeta
    usage: Usage


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """How well a pair of texts fits together."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of POST /v1/score."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: Usage


class Classification(msgspec.Struct, frozen=True, kw_only=True):
    """The likeliest label of one input, and the probabilities of all, in the model's order."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of POST /v1/classify. Written straight from the float32 rows; this type describes it."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Classification]
    usage: Usage


class TokenizedText(msgspec.Struct, frozen=True, kw_only=True):
    """The token ids of one text."""

    index: int
    tokens: list[int]
    count: int


class TokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of POST /tokenize."""

    model: str
    max_seq_len: int
    data: list[TokenizedText]


class DetokenizedText(msgspec.Struct, frozen=True, kw_only=True):
    """The text of one list of ids."""

    index: int
    text: str


class DetokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of POST /detokenize."""

    data: list[DetokenizedText]


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
