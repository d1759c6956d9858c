"""The wire messages: what frontend, broker and worker say to each other.

Every message is three frames: one byte of type, a header (a msgpack array checked against the struct below), and a raw
payload. Payload down (frontend, broker, worker): the tokens of all inputs, joined, one little-endian int32 word each: the token
id, and for a model that tells segments apart (``ModelFacts.segments``) the segment from bit ``SEGMENT_SHIFT`` on. Payload up:
the output rows of all inputs, joined, little-endian float32. The broker never decodes a payload; it cuts and joins it by the
lengths in the header.

Rules at one glance:

- A frontend numbers its requests (``rid``); the pair (frontend identity, rid) names a request. A second live copy is dropped.
- A batch id is new for every attempt; those from ``FIRST_CANARY_ID`` on are canaries. An answer counts only while (boot_id,
  batch_id) is open on the worker that sends it.
- ``boot_id`` is new for every start of the broker. Who sees a new one introduces itself again; a frontend also resubmits
  what is open, marked ``resubmitted`` so that the queue limit lets it in.
- A broker that hears from a peer it does not know answers ``Introduce``; the peer sends its hello again.
"""

from __future__ import annotations

import enum
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from packhorse_shared.meter import CELLS, FRONTEND_CELLS
from packhorse_shared.settings import MAX_BATCH_INPUTS, MAX_FRONTENDS, MAX_INPUTS, MAX_PROCESSES, MAX_TOKENS

PROTOCOL_VERSION = 5
MAX_LABELS = 4096
MAX_CANARY_TOKENS = 16
MAX_FACTS_BYTES = 60_000
"""Of an encoded ``ModelFacts``: a header has 64 KiB, and those that hold one a little more than it."""
WORST_PRIORITY = 100
BYTES_PER_TOKEN = 4
SEGMENT_SHIFT = 24
"""Of a token's word: where its segment begins. Below it is the token id."""
MAX_SEGMENTS = 1 << (31 - SEGMENT_SHIFT)
BYTES_PER_VALUE = 4
FIRST_CANARY_ID = 1 << 62
"""Batch ids from here on are canaries: batches of the broker's own that prove a worker."""
BEAT_INTERVAL_S = 0.25
"""A worker beats this often, from its I/O thread; silent for 1 s it counts as hung."""
PING_INTERVAL_S = 0.25
"""A frontend pings this often; a broker silent for 1 s counts as gone."""

Count = Annotated[int, Meta(ge=0, le=1 << 40)]
Unsigned64 = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Milliseconds = Annotated[float, Meta(ge=0, le=1e12)]
ShortText = Annotated[str, Meta(max_length=256)]
Message = Annotated[str, Meta(max_length=4096)]
Priority = Annotated[int, Meta(ge=-WORST_PRIORITY, le=WORST_PRIORITY)]
ProcessId = Annotated[int, Meta(ge=0, le=1 << 22)]
"""0 for a process that cannot be watched; the largest is Linux's PID_MAX_LIMIT."""
Task = Literal["embedding", "classify", "reward", "token_reward", "rerank"]
"""What a model's output is: a text's vector, the logits of its labels, of a reward, of labels for each token, of relevance."""
Probabilities = Literal["none", "sigmoid", "softmax"]
"""What turns a classifier's logits into the probabilities of its labels."""
Slot = Annotated[int, Meta(ge=-1, lt=MAX_PROCESSES)]
"""A worker's slot under supervisord; -1 for one started by hand."""


class _Header(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A header: positional on the wire, checked field by field, no more and no fewer fields than declared."""

    def payload_bytes(self) -> int | None:
        """Size that the payload must have: 0 where a message has none, None where it cannot be known."""
        return 0


class ErrorCode(enum.StrEnum):
    """Why a request failed. The frontend turns each into an HTTP status; see its ``problems.py``."""

    QUEUE_FULL = "queue_full"
    WAIT_TOO_LONG = "wait_too_long"
    NO_WORKER = "no_worker"
    LOADING = "loading"
    DRAINING = "draining"
    TIMEOUT = "timeout"
    INPUT_TOO_LONG = "input_too_long"
    WORKER_DIED = "worker_died"
    FORWARD_FAILED = "forward_failed"
    NON_FINITE_OUTPUT = "non_finite_output"
    OUT_OF_MEMORY = "out_of_memory"


class PairSlot(enum.IntEnum):
    """Where a text goes in a ``PairText``."""

    QUERY = 0
    DOCUMENT = 1
    PROMPT = 2


PairPiece = Annotated[str, Meta(max_length=8192)] | PairSlot


class EncodeOptions(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """How one input is to be encoded, beside its ids."""

    prompt_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] = 0
    """Leading tokens that belong to a prompt: a model with ``include_prompt=false`` leaves them out of its pooling."""
    scored: bool = False
    """Whether the output is wanted as scores: after the model's own activation, in float32."""


class PairText(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a chat template makes one text of a pair: literal pieces, and between them the texts (``PairSlot``), in order.

    Found out by the worker, so that no template of a model has to be run where requests come in.
    """

    plain: Annotated[tuple[PairPiece, ...], Meta(max_length=64)]
    """Without a prompt."""
    prompted: Annotated[tuple[PairPiece, ...], Meta(max_length=64)]
    """With one."""
    strips: bool = False
    """Whether white space around each text is dropped."""


class ModelFacts(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a worker found out about its model: all that the frontends need to know to validate and to answer."""

    name: ShortText
    task: Task
    dimension: Annotated[int, Meta(ge=1, le=1 << 24)]
    """Values of one output: of one input, or of one token where ``task`` is ``token_reward``."""
    labels: Annotated[tuple[ShortText, ...], Meta(max_length=MAX_LABELS)] = ()
    """Names of these values, in order; () where they have none, or where the names are too many or too long to be told."""
    activation: ShortText = "Identity"
    """Name of the class in ``torch.nn`` that turns an output into scores."""
    max_seq_len: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    """Longest input in tokens, special tokens included: the model's own limit or ``--max_seq_len``."""
    dtype: ShortText
    vocabulary_rows: Annotated[int, Meta(ge=1)]
    """Rows of the embedding table: token ids are valid from 0 up to this, exclusive."""
    matryoshka_dimensions: tuple[Annotated[int, Meta(ge=1)], ...] = ()
    """Sizes that ``dimensions`` may ask for besides ``dimension``."""
    matryoshka_any: bool = False
    """Whether ``dimensions`` may ask for every size up to ``dimension``."""
    prompts: dict[ShortText, Annotated[str, Meta(max_length=8192)]] = {}
    default_prompt_name: ShortText | None = None
    lowercase: bool = False
    """Whether text is lower-cased before it is tokenized (``do_lower_case`` of sentence_bert_config.json)."""
    probabilities: Probabilities = "none"
    """Of a model with a classifier's head, whatever its task; what transformers' text-classification pipeline would apply."""
    segments: Annotated[int, Meta(ge=1, le=MAX_SEGMENTS)] = 1
    """Segments (token types) that the model tells apart: 1 for none, as for all text-embedding models, which get no pairs. With
    more, the words of a pair's tokens carry them, and token ids are below ``1 << SEGMENT_SHIFT``."""
    pair_text: PairText | None = None
    """Of a reranker whose chat template joins the texts of a pair; None where the pair template of its tokenizer does."""
    pair_problem: Annotated[str, Meta(max_length=512)] = ""
    """Why pairs of texts cannot be made for this reranker, in one line that names no folder; empty where they can."""
    canary: Annotated[
        tuple[Annotated[int, Meta(ge=0, le=(1 << 31) - 1)], ...], Meta(min_length=1, max_length=MAX_CANARY_TOKENS)
    ]
    """Ids of a short input that this model can run: what a worker must encode rightly before it is given a user's input."""
    fingerprint: ShortText
    """Equal for two workers exactly when they serve the same weights in the same way."""


class WorkerLimits(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What one worker takes in one batch, and whether it begins a second one before the first one is answered."""

    max_batch_size: Annotated[int, Meta(ge=1, le=MAX_BATCH_INPUTS)]
    max_num_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    overlaps: bool = False


# ---- frontend -> broker ----


class FrontendHello(_Header, array_like=True, frozen=True):
    """First message of a frontend. The pid lets a broker on the same host see its death at once."""

    version: int
    index: Annotated[int, Meta(ge=0, lt=MAX_FRONTENDS)]
    pid: ProcessId


class SubmittedRequest(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """One HTTP request: its inputs' lengths in tokens, in order."""

    rid: Unsigned64
    lengths: Annotated[list[Annotated[int, Meta(ge=1, le=MAX_TOKENS)]], Meta(min_length=1, max_length=MAX_INPUTS)]
    ttl_ms: Annotated[int, Meta(ge=0, le=100_000_000)]
    """Milliseconds that are left of the request's timeout."""
    priority: Priority = 0
    options: EncodeOptions = EncodeOptions()
    resubmitted: bool = False


class Submit(_Header, array_like=True, frozen=True):
    """Requests of one event-loop tick. Payload: the ids of all inputs of all requests, in order."""

    requests: Annotated[list[SubmittedRequest], Meta(min_length=1, max_length=MAX_INPUTS)]

    def payload_bytes(self) -> int:  # noqa: D102 (see the base class)
        return BYTES_PER_TOKEN * sum(sum(request.lengths) for request in self.requests)


class Cancel(_Header, array_like=True, frozen=True):
    """The clients of these requests are gone, or their time is over: drop what is queued."""

    rids: Annotated[list[Unsigned64], Meta(min_length=1, max_length=MAX_INPUTS)]


class Ping(_Header, array_like=True, frozen=True):
    """Answered with ``BrokerState``."""


class StatusQuery(_Header, array_like=True, frozen=True):
    """Answered with ``StatusReport``. Anyone who may open the socket may ask; no hello is needed."""


class Tally(_Header, array_like=True, frozen=True):
    """What a frontend has counted since its last one, by cells of ``meter.py``. Sent with a ping, if there is anything."""

    changes: Annotated[
        list[
            tuple[Annotated[int, Meta(ge=0, lt=FRONTEND_CELLS)], Annotated[float, Meta(ge=0, le=1e12)]]  # cell, amount
        ],
        Meta(min_length=1, max_length=FRONTEND_CELLS),
    ]


class MetricsQuery(_Header, array_like=True, frozen=True):
    """Answered with ``MetricsReport``. Anyone who may open the socket may ask; no hello is needed."""


# ---- broker -> frontend ----


class BrokerState(_Header, array_like=True, frozen=True, kw_only=True):
    """Answer to hello and ping; also sent unasked when workers come or go, the queue fills or empties, or a drain begins."""

    boot_id: Unsigned64
    draining: bool
    queue_inputs: Count
    queue_limit: Count
    ready_workers: Count
    loading_workers: Count
    max_num_tokens: Count
    """Most tokens that the largest ready worker takes in one batch; 0 while none is ready."""
    retry_after_s: Annotated[int, Meta(ge=1, le=30)]
    """What a refusal made now should tell the client."""
    model: ModelFacts | None
    """None until the first worker is ready; kept when all workers are gone."""


class RequestRows(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Rows of one request in a ``Result``: input indexes, and each row's number of float32 values."""

    rid: Unsigned64
    indexes: Annotated[list[Annotated[int, Meta(ge=0, le=MAX_INPUTS)]], Meta(min_length=1, max_length=MAX_BATCH_INPUTS)]
    row_values: list[Annotated[int, Meta(ge=1, le=1 << 28)]]
    queue_ms: Milliseconds
    """Longest wait in the queue among these inputs."""
    encode_ms: Milliseconds
    """Time of the forward pass that they shared."""


class Result(_Header, array_like=True, frozen=True):
    """One message per (batch, frontend). Payload: the rows of all listed inputs, in order."""

    requests: Annotated[list[RequestRows], Meta(min_length=1, max_length=MAX_BATCH_INPUTS)]

    def payload_bytes(self) -> int:  # noqa: D102 (see the base class)
        return BYTES_PER_VALUE * sum(sum(request.row_values) for request in self.requests)


class RequestFailure(_Header, array_like=True, frozen=True):
    """A request failed as a whole; the broker forgets it. ``retry_after_s`` 0 means no hint."""

    rid: Unsigned64
    code: ErrorCode
    message: Message
    retry_after_s: Annotated[int, Meta(ge=0, le=120)] = 0
    index: Annotated[int, Meta(ge=0, le=MAX_INPUTS)] | None = None
    """The input that is to blame, where one is."""


class ModelStatus(msgspec.Struct, frozen=True):
    """``model`` of GET /status."""

    name: str
    task: str
    dimension: int
    max_seq_len: int
    dtype: str


class QueueStatus(msgspec.Struct, frozen=True):
    """``queue`` of GET /status."""

    inputs: int
    requests: int
    oldest_wait_ms: float
    limit: int


class WorkerStatus(msgspec.Struct, frozen=True):
    """One of ``workers`` of GET /status. Counters count from the worker's start; ``busy`` is a share of the last seconds."""

    id: str
    pid: int
    device: str
    state: str
    """``loading``, ``ready``, ``busy``, ``draining`` or ``gone``."""
    in_flight: int
    batches: int
    inputs: int
    tokens: int
    busy: float
    memory_bytes: int


class RateStatus(msgspec.Struct, frozen=True):
    """``rates`` of GET /status, over the last seconds."""

    requests_per_s: float
    inputs_per_s: float
    tokens_per_s: float


class StatusReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of GET /status, made by the broker. On the wire the header is this struct as a msgpack map."""

    version: str
    model: ModelStatus | None
    queue: QueueStatus
    workers: list[WorkerStatus]
    rates: RateStatus

    def payload_bytes(self) -> int:  # noqa: D102 (as every header)
        return 0


class MetricsReport(_Header, array_like=True, frozen=True):
    """Every number of GET /metrics, by the cells of ``meter.py``."""

    values: Annotated[list[Annotated[float, Meta(ge=0)]], Meta(min_length=CELLS, max_length=CELLS)]


# ---- worker -> broker ----


class WorkerAnnounce(_Header, array_like=True, frozen=True):
    """First message of a worker: it exists and loads its model. It gets no work before its ``WorkerHello``."""

    version: int
    token: ShortText
    slot: Slot
    pid: ProcessId
    incarnation: Unsigned64
    """Random: tells a restarted worker from its predecessor."""
    device: ShortText


class WorkerHello(_Header, array_like=True, frozen=True):
    """The worker has loaded and warmed up: it wants work, and is sent the canary. Also the answer to ``Introduce``."""

    version: int
    token: ShortText
    slot: Slot
    pid: ProcessId
    incarnation: Unsigned64
    device: ShortText
    model: ModelFacts
    limits: WorkerLimits


class Beat(_Header, array_like=True, frozen=True):
    """Every ``BEAT_INTERVAL_S``, from the I/O thread, loading or not."""

    batch_id: Unsigned64
    """The batch that runs; 0 when none does."""
    busy_ms: Milliseconds
    """How long it has run."""
    memory_bytes: Count


class InputFailure(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """One input of a batch that failed while the others did not."""

    index: Annotated[int, Meta(ge=0, lt=MAX_BATCH_INPUTS)]
    """Position in the batch."""
    code: ErrorCode
    message: ShortText
    """May be empty: a worker bounds the text of one ``Done`` so that its header stays small."""


class Done(_Header, array_like=True, frozen=True):
    """A batch is finished. Payload: the rows, in batch order; a failed input's row has 0 values."""

    boot_id: Unsigned64
    batch_id: Unsigned64
    row_values: Annotated[list[Annotated[int, Meta(ge=0, le=1 << 28)]], Meta(min_length=1, max_length=MAX_BATCH_INPUTS)]
    failures: Annotated[list[InputFailure], Meta(max_length=MAX_BATCH_INPUTS)]
    encode_ms: Milliseconds

    def payload_bytes(self) -> int:  # noqa: D102 (see the base class)
        return BYTES_PER_VALUE * sum(self.row_values)


class BatchFailed(_Header, array_like=True, frozen=True):
    """A batch failed as a whole and no input of it is to blame. ``retryable``: another attempt may succeed."""

    boot_id: Unsigned64
    batch_id: Unsigned64
    code: ErrorCode
    message: Message
    retryable: bool


class Bye(_Header, array_like=True, frozen=True):
    """The worker leaves. After its last answer (``reason`` empty), or because it cannot start (one line saying why)."""

    reason: Message


class SettingsQuery(_Header, array_like=True, frozen=True):
    """A worker of another machine asks for the settings of the server that it is about to join. No hello is needed. Answered
    with ``ServerSettings``."""


class Draining(_Header, array_like=True, frozen=True):
    """The worker was told to stop: it finishes what it runs, takes nothing new, and hands back what it has not begun."""

    returned: Annotated[list[Unsigned64], Meta(max_length=8)]
    """Batch ids at hand that it will not run."""


# ---- broker -> worker ----


class Join(_Header, array_like=True, frozen=True):
    """The worker is in: it showed what it must, and answered the canary."""

    boot_id: Unsigned64


class Refused(_Header, array_like=True, frozen=True):
    """The worker may not join (token, version, another model). It stops; the reason is one line for its log."""

    reason: Message


class Work(_Header, array_like=True, frozen=True):
    """A batch to encode. Payload: the ids of its inputs, joined."""

    boot_id: Unsigned64
    batch_id: Unsigned64
    lengths: Annotated[list[Annotated[int, Meta(ge=1, le=MAX_TOKENS)]], Meta(min_length=1, max_length=MAX_BATCH_INPUTS)]
    options: Annotated[list[EncodeOptions], Meta(max_length=MAX_BATCH_INPUTS)] = []
    """One per input, or empty when all are the defaults."""

    def payload_bytes(self) -> int:  # noqa: D102 (see the base class)
        return BYTES_PER_TOKEN * sum(self.lengths)


class Quit(_Header, array_like=True, frozen=True):
    """The broker gave this worker up (a stuck batch, a wrong canary) and cannot kill it, because it runs on another machine: it
    ends at once, as after a fault, so that it is started again."""

    reason: Message


class ServerSettings(_Header, array_like=True, frozen=True):
    """The server's settings without secrets. Payload: their JSON text, as in the run directory's settings.json."""

    def payload_bytes(self) -> None:  # noqa: D102 (see the base class)
        return None


class Drain(_Header, array_like=True, frozen=True):
    """The broker stops: finish, say bye, exit 0. supervisord decides whether a new one starts."""


# ---- broker -> anyone ----


class Introduce(_Header, array_like=True, frozen=True):
    """The broker does not know the sender: send your hello (again)."""

    boot_id: Unsigned64
