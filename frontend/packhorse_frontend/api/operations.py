"""The table of every route: what /openapi.json and /docs say of it. A test compares it with ``routes.py``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from packhorse_frontend import schema
from packhorse_shared.messages import StatusReport, Task

JSON = "application/json"
HTML = "text/html"
_ANY_STATUSES = (400, 408, 431, 503)
"""Of every route: the connection itself may be refused, or its bytes be no request."""
_WORK_STATUSES = (404, 413, 415, 500, 504)
_QUEUE_STATUSES = (*_WORK_STATUSES, 429)
TIMING_HEADERS = ("x-packhorse-queue-ms", "x-packhorse-tokenize-ms", "x-packhorse-encode-ms")


@dataclass(frozen=True)
class Operation:
    """One thing that can be asked for."""

    name: str
    """Unique: the operationId."""
    method: Literal["GET", "POST"]
    paths: tuple[str, ...]
    """The first one is the one to use; the others do the same."""
    summary: str
    description: str
    group: str
    answer: Any = None
    """The type of a 200; None where it is not JSON."""
    media_types: tuple[str, ...] = (JSON,)
    request: type[Any] | None = None
    variant: str = ""
    """What the request is called where the rules of its type are other ones here."""
    required: tuple[str, ...] = ()
    """Fields of the request that must be there: their types allow null only so that the parser can say so in its own words."""
    example: Mapping[str, Any] = field(default_factory=dict)
    """A request, but for the model's name."""
    refusals: tuple[int, ...] = ()
    """Statuses besides 200, those that every route has, and 401."""
    headers: tuple[str, ...] = ()
    """Of a 200, besides x-request-id."""
    is_open: bool = False
    """Whether no key is needed."""
    tasks: tuple[Task, ...] = ()
    """Of the models that it is for; () for all."""

    @property
    def statuses(self) -> tuple[int, ...]:
        """All but 200 and 401, in order."""
        return tuple(sorted({*_ANY_STATUSES, *self.refusals}))


_RERANK = {
    "query": "how do I repair a flat tyre?",
    "documents": ["Take the wheel off, then find the hole.", "The bakery opens at six."],
    "top_n": 2,
}

OPERATIONS = (
    Operation(
        name="createEmbeddings",
        method="POST",
        paths=("/v1/embeddings", "/embeddings"),
        summary="Embed texts or token ids",
        description=(
            "One vector for each input, in the inputs' order. For a classifier or a reward model the vector is its logits. "
            "Numbers come back as exactly the float32 that base64 gives."
        ),
        group="Inference",
        answer=schema.EmbeddingsAnswer,
        request=schema.EmbeddingsRequest,
        required=("input",),
        example={"input": ["a pack horse carries two bags", "the mule is tired"]},
        refusals=_QUEUE_STATUSES,
        headers=TIMING_HEADERS,
    ),
    Operation(
        name="rerank",
        tasks=("rerank",),
        method="POST",
        paths=("/v1/rerank", "/rerank"),
        summary="Rank documents for a query",
        description="For rerankers. Cohere's v1 and Jina's shape: the best document first, with the model's own activation.",
        group="Inference",
        answer=schema.RerankAnswer,
        request=schema.RerankRequest,
        required=("query", "documents"),
        example=_RERANK,
        refusals=_QUEUE_STATUSES,
        headers=TIMING_HEADERS,
    ),
    Operation(
        name="rerankV2",
        tasks=("rerank",),
        method="POST",
        paths=("/v2/rerank",),
        summary="Rank documents for a query, in Cohere's v2 shape",
        description="As /v1/rerank, but with the answer that Cohere's v2 clients read; top_n must be at least 1.",
        group="Inference",
        answer=schema.RerankAnswerV2,
        request=schema.RerankRequest,
        variant="RerankRequestV2",
        required=("query", "documents"),
        example=_RERANK,
        refusals=_QUEUE_STATUSES,
        headers=TIMING_HEADERS,
    ),
    Operation(
        name="score",
        tasks=("embedding", "rerank"),
        method="POST",
        paths=("/v1/score",),
        summary="Score pairs of texts",
        description="One text_1 with each text_2, or as many of both. A reranker scores them; of embeddings it is the cosine.",
        group="Inference",
        answer=schema.ScoreAnswer,
        request=schema.ScoreRequest,
        required=("text_1", "text_2"),
        example={"text_1": "a pack horse", "text_2": ["a beast of burden", "a sailing boat"]},
        refusals=_QUEUE_STATUSES,
        headers=TIMING_HEADERS,
    ),
    Operation(
        name="classify",
        tasks=("classify",),
        method="POST",
        paths=("/v1/classify",),
        summary="Classify texts or token ids",
        description="For classifiers. The likeliest label of each input, and the probabilities of all labels.",
        group="Inference",
        answer=schema.ClassifyAnswer,
        request=schema.ClassifyRequest,
        required=("input",),
        example={"input": ["what a fine day"]},
        refusals=_QUEUE_STATUSES,
        headers=TIMING_HEADERS,
    ),
    Operation(
        name="tokenize",
        method="POST",
        paths=("/tokenize",),
        summary="Turn texts into token ids",
        description="The ids that the model would be given for each text, without any prompt; more than it takes is fine.",
        group="Tokens",
        answer=schema.TokenizeAnswer,
        request=schema.TokenizeRequest,
        required=("input",),
        example={"input": "a pack horse"},
        refusals=_WORK_STATUSES,
    ),
    Operation(
        name="detokenize",
        method="POST",
        paths=("/detokenize",),
        summary="Turn token ids into texts",
        description="The text of each list of ids.",
        group="Tokens",
        answer=schema.DetokenizeAnswer,
        request=schema.DetokenizeRequest,
        required=("tokens",),
        example={"tokens": [11, 12, 13]},
        refusals=_WORK_STATUSES,
    ),
    Operation(
        name="listModels",
        method="GET",
        paths=("/v1/models",),
        summary="List the served names",
        description="What the model is like is null until a worker has loaded it.",
        group="The server",
        answer=schema.ModelList,
    ),
    Operation(
        name="getModel",
        method="GET",
        paths=("/v1/models/{name}",),
        summary="Look up one served name",
        description="A name may hold slashes, as those of the Hugging Face hub do.",
        group="The server",
        answer=schema.ModelCard,
        refusals=(404,),
    ),
    Operation(
        name="health",
        method="GET",
        paths=("/health",),
        summary="Ask whether requests are served",
        description="200 while a worker is ready and the broker answers, a full queue or not; else 503 with the reason.",
        group="The server",
        answer=schema.Healthy,
        is_open=True,
    ),
    Operation(
        name="live",
        method="GET",
        paths=("/live",),
        summary="Ask whether this process answers",
        description="Says nothing of the model: a loading server is alive.",
        group="The server",
        answer=schema.Healthy,
        is_open=True,
    ),
    Operation(
        name="status",
        method="GET",
        paths=("/status",),
        summary="Look at the queue, the workers and the rates",
        description="What the broker knows. A worker's counters count from its start; rates and busy are of the last seconds.",
        group="The server",
        answer=StatusReport,
    ),
    Operation(
        name="metrics",
        method="GET",
        paths=("/metrics",),
        summary="Read the metrics of all processes",
        description="In Prometheus' text format, or in OpenMetrics where `accept` asks for it.",
        group="The server",
        media_types=("text/plain", "application/openmetrics-text"),
    ),
    Operation(
        name="statusPage",
        method="GET",
        paths=("/",),
        summary="Open the live status page",
        description="Holds no data itself: it asks /status, /metrics and /health, with a key where one is needed.",
        group="Pages",
        media_types=(HTML,),
        is_open=True,
    ),
    Operation(
        name="docsPage",
        method="GET",
        paths=("/docs",),
        summary="Open the page of this API",
        description="Holds no data itself: it asks /openapi.json, with a key where one is needed.",
        group="Pages",
        media_types=(HTML,),
        is_open=True,
    ),
    Operation(
        name="openapi",
        method="GET",
        paths=("/openapi.json",),
        summary="Get this description",
        description="OpenAPI 3.1, made from the types that check the requests.",
        group="Pages",
        answer=dict[str, Any],
    ),
)
