"""The one table of all metrics: what GET /metrics tells, and what each number means.

The exposition, docs/metrics.md and the numbering of all series (``meter.py``) follow from it. Every series that a label's
values allow is always there, zeros included, so that their number never grows: nothing that a client sends becomes a label.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from packhorse_shared import __version__


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One metric and all the series it will ever have."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    moves: str
    """When it changes, for the docs."""
    unit: str = ""
    """What its values are, in the plural; ``seconds``, ``bytes`` and ``ratio`` end the name, as Prometheus wants it."""
    labels: tuple[str, ...] = ()
    series: tuple[tuple[str, ...], ...] = ((),)
    """The label values of each series, in the order of ``labels``."""
    bounds: tuple[float, ...] = ()
    """Of a histogram's buckets, upper and inclusive; one bucket more holds what is larger."""


OTHER = "other"
"""Stands for every value that has no series of its own."""
TIMED_ENDPOINTS = ("embeddings", "rerank", "score", "classify", "tokenize", "detokenize")
TIMED_STATUSES = frozenset({200, 500, 504})
"""Of requests that were worked on, and not refused or given up."""
_MODEL_STATUSES = "200 400 401 404 408 413 415 429 499 500 503 504 other"
_TEXT_STATUSES = "200 400 401 404 408 413 415 499 500 503 504 other"
STATUSES = {
    "embeddings": _MODEL_STATUSES,
    "rerank": _MODEL_STATUSES,
    "score": _MODEL_STATUSES,
    "classify": _MODEL_STATUSES,
    "tokenize": _TEXT_STATUSES,
    "detokenize": _TEXT_STATUSES,
    "models": "200 401 404 499 503 other",
    "operators": "200 401 499 500 503 other",
    OTHER: "204 400 401 403 404 405 408 431 499 503 other",
}
"""The statuses that each endpoint's answers can have."""

# ---- counted in frontends, which tell the broker what grew ----

REQUESTS = Metric(
    name="packhorse_requests_total",
    kind="counter",
    help="HTTP requests by endpoint and status; 499: the client left before its answer was complete.",
    moves="a request is over, whoever answered it",
    unit="requests",
    labels=("endpoint", "status"),
    series=tuple((endpoint, status) for endpoint, statuses in STATUSES.items() for status in statuses.split()),
)
REQUEST_SECONDS = Metric(
    name="packhorse_request_seconds",
    kind="histogram",
    help="Time from a request's head to the last byte of its answer; of requests that were worked on.",
    moves="a request ends with 200, 500 or 504",
    unit="seconds",
    labels=("endpoint",),
    series=tuple((endpoint,) for endpoint in TIMED_ENDPOINTS),
    bounds=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
TOKENIZE_SECONDS = Metric(
    name="packhorse_tokenize_seconds",
    kind="histogram",
    help="Time that the texts of a request to be encoded took to tokenize, waiting for a thread included.",
    moves="the texts of a request are tokenized; not for ids, and not for /tokenize",
    unit="seconds",
    bounds=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.25, 1.0, 5.0),
)
TRUNCATED_INPUTS = Metric(
    name="packhorse_truncated_inputs_total",
    kind="counter",
    help="Inputs that were cut because their request allowed it.",
    moves="an input is cut",
    unit="inputs",
)
REJECTED = Metric(
    name="packhorse_rejected_total",
    kind="counter",
    help="Requests that were refused for the state of the server, not for a fault of their own.",
    moves="a frontend or the broker refuses a request; each request counts once",
    unit="requests",
    labels=("reason",),
    series=tuple(
        (reason,)
        for reason in (
            "queue_full",
            "wait_too_long",
            "no_worker",
            "loading",
            "draining",
            "quarantine",
            "too_long",
            "too_late",
            "too_many_connections",
            "too_many_large_bodies",
            OTHER,
        )
    ),
)

# ---- counted by the broker ----

INPUTS = Metric(
    name="packhorse_inputs_total",
    kind="counter",
    help="Inputs whose rows were sent to the frontend that asked.",
    moves="a batch comes back",
    unit="inputs",
)
TOKENS = Metric(
    name="packhorse_tokens_total",
    kind="counter",
    help="Tokens of these inputs.",
    moves="a batch comes back",
    unit="tokens",
)
RETRIES = Metric(
    name="packhorse_retries_total",
    kind="counter",
    help="Inputs that must be handed to a worker again, since the one that ran them died, fell silent or failed on the batch.",
    moves="a worker dies, hangs or fails with inputs on it",
    unit="inputs",
)
FAILED = Metric(
    name="packhorse_failed_total",
    kind="counter",
    help="Requests that were accepted and then failed.",
    moves="the broker gives a request up",
    unit="requests",
    labels=("reason",),
    series=tuple(
        (reason,)
        for reason in ("timeout", "worker_died", "forward_failed", "non_finite_output", "out_of_memory", "draining", OTHER)
    ),
)
WORKER_EXITS = Metric(
    name="packhorse_worker_exits_total",
    kind="counter",
    help="Workers that are gone: left by themselves, died (lost), killed by the broker for a fault, or refused by it.",
    moves="a worker goes",
    unit="workers",
    labels=("how",),
    series=(("left",), ("lost",), ("killed",), ("refused",)),
)
SILENCES = Metric(
    name="packhorse_worker_silences_total",
    kind="counter",
    help="Times that a worker fell silent, or its link was cut, and its work was moved.",
    moves="nothing came from a worker for a second",
    unit="silences",
)
CANARY_FAILURES = Metric(
    name="packhorse_canary_failures_total",
    kind="counter",
    help="Wrong answers of workers to the canary batch.",
    moves="a worker that starts or comes back computes nonsense",
    unit="answers",
)
MALFORMED = Metric(
    name="packhorse_malformed_messages_total",
    kind="counter",
    help="Messages on the broker's sockets that were none, and were dropped.",
    moves="a peer sends what does not fit the protocol",
    unit="messages",
)
QUEUE_WAIT_SECONDS = Metric(
    name="packhorse_queue_wait_seconds",
    kind="histogram",
    help="Time from an input's arrival in the queue until it was handed to the worker that answered it.",
    moves="a batch comes back: once for each input",
    unit="seconds",
    bounds=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0),
)
BATCH_INPUTS = Metric(
    name="packhorse_batch_inputs",
    kind="histogram",
    help="Inputs of a batch.",
    moves="a batch is handed to a worker",
    unit="inputs",
    bounds=(1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 1024.0),
)
BATCH_TOKENS = Metric(
    name="packhorse_batch_tokens",
    kind="histogram",
    help="Tokens of a batch.",
    moves="a batch is handed to a worker",
    unit="tokens",
    bounds=(64.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 65536.0),
)
BATCH_FILL_RATIO = Metric(
    name="packhorse_batch_fill_ratio",
    kind="histogram",
    help="How full a batch is: its inputs or its tokens, of what the worker takes, whichever is nearer to the limit.",
    moves="a batch is handed to a worker",
    unit="ratio",
    bounds=(0.1, 0.25, 0.5, 0.75, 0.9, 1.0),
)
ENCODE_SECONDS = Metric(
    name="packhorse_encode_seconds",
    kind="histogram",
    help="Time of a batch in the model, as its worker measured it.",
    moves="a batch comes back",
    unit="seconds",
    bounds=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0),
)

# ---- as things are when somebody asks ----

_NOW = "is looked up at every scrape"
QUEUE_INPUTS = Metric(
    name="packhorse_queue_inputs", kind="gauge", help="Inputs that wait for a worker.", moves=_NOW, unit="inputs"
)
QUEUE_LIMIT_INPUTS = Metric(
    name="packhorse_queue_limit_inputs",
    kind="gauge",
    help="Waiting inputs at which new requests get 429 (max_queue_size).",
    moves="is a setting",
    unit="inputs",
)
QUEUE_OLDEST_SECONDS = Metric(
    name="packhorse_queue_oldest_seconds",
    kind="gauge",
    help="How long the oldest waiting input has waited; 0 while none waits.",
    moves=_NOW,
    unit="seconds",
)
OPEN_REQUESTS = Metric(
    name="packhorse_open_requests",
    kind="gauge",
    help="Requests that were accepted and are not answered.",
    moves=_NOW,
    unit="requests",
)
INPUTS_IN_FLIGHT = Metric(
    name="packhorse_inputs_in_flight",
    kind="gauge",
    help="Inputs that workers have: in the batch that runs and in the one at hand.",
    moves=_NOW,
    unit="inputs",
)
QUARANTINED_INPUTS = Metric(
    name="packhorse_quarantined_inputs",
    kind="gauge",
    help="Inputs that made workers die, and are refused for ten minutes.",
    moves=_NOW,
    unit="inputs",
)
WORKERS = Metric(
    name="packhorse_workers",
    kind="gauge",
    help="Workers by state, as in GET /status; gone: silent, or gone within the last minute.",
    moves=_NOW,
    unit="workers",
    labels=("state",),
    series=(("loading",), ("ready",), ("busy",), ("draining",), ("gone",)),
)
WORKERS_BUSY_RATIO = Metric(
    name="packhorse_workers_busy_ratio",
    kind="gauge",
    help="Share of the last seconds that a worker computed, as a mean over the workers that are ready or busy.",
    moves=_NOW,
    unit="ratio",
)
WORKERS_MEMORY_BYTES = Metric(
    name="packhorse_workers_memory_bytes",
    kind="gauge",
    help="Memory that all workers hold: of the device, or of the process on a CPU.",
    moves=_NOW,
    unit="bytes",
)
FRONTENDS = Metric(
    name="packhorse_frontends", kind="gauge", help="Frontends that the broker knows.", moves=_NOW, unit="frontends"
)
UPTIME_SECONDS = Metric(
    name="packhorse_uptime_seconds",
    kind="gauge",
    help="Time since the broker started; all counters count from then.",
    moves=_NOW,
    unit="seconds",
)
BUILD_INFO = Metric(
    name="packhorse_build_info",
    kind="gauge",
    help="Always 1; the label says which version runs.",
    moves="never",
    labels=("version",),
    series=((__version__,),),
)

FRONTEND_METRICS = (REQUESTS, REQUEST_SECONDS, TOKENIZE_SECONDS, TRUNCATED_INPUTS, REJECTED)
"""What a frontend may tell the broker of. The broker counts in ``REJECTED`` too."""
METRICS = (
    *FRONTEND_METRICS,
    INPUTS,
    TOKENS,
    RETRIES,
    FAILED,
    WORKER_EXITS,
    SILENCES,
    CANARY_FAILURES,
    MALFORMED,
    QUEUE_WAIT_SECONDS,
    BATCH_INPUTS,
    BATCH_TOKENS,
    BATCH_FILL_RATIO,
    ENCODE_SECONDS,
    QUEUE_INPUTS,
    QUEUE_LIMIT_INPUTS,
    QUEUE_OLDEST_SECONDS,
    OPEN_REQUESTS,
    INPUTS_IN_FLIGHT,
    QUARANTINED_INPUTS,
    WORKERS,
    WORKERS_BUSY_RATIO,
    WORKERS_MEMORY_BYTES,
    FRONTENDS,
    UPTIME_SECONDS,
    BUILD_INFO,
)
"""All of them. A change here is a new ``PROTOCOL_VERSION``: the numbers on the wire follow from the order."""
