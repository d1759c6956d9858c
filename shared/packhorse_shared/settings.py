"""The settings: one frozen typed tree, passed by section.

This module is the single list of what can be set. The command line, the environment, the YAML file, ``--help`` and the
settings page of the docs are all made from the fields below: their names, types, bounds, defaults and descriptions.
``load.py`` fills the tree; nothing else reads argv or the environment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

MAX_INPUTS = 10_000
"""Most inputs one message can describe in its header; bounds ``max_inputs``."""
MAX_BATCH_INPUTS = 4096
"""Most inputs one batch can describe in its header; bounds ``max_batch_size``."""
MAX_TOKENS = 1 << 22
"""Most tokens of one input or one batch that any process accepts; bounds ``max_num_tokens`` and ``max_seq_len``."""
MAX_PROCESSES = 64
"""Worker slots in supervisord.conf."""
MAX_FRONTENDS = 32
"""Frontend slots in supervisord.conf."""
MAX_SHUTDOWN_GRACE_S = 3600
"""Below stopwaitsecs in supervisord.conf, after which supervisord kills."""

T = TypeVar("T")
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which model is served and what its vectors are."""

    model: Annotated[
        str | None, Meta(description="Hugging Face name or local folder; without it, the model of the `demo` extra")
    ] = None
    served_model_name: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...],
        Meta(description="every name the API answers to, the first is echoed; by default MODEL's name"),
    ] = ()
    revision: Annotated[str, Meta(description="Hugging Face revision", min_length=1)] = "main"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="number format of the weights; auto is bfloat16 on CUDA and float32 on CPU"),
    ] = "auto"
    max_seq_len: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None,
        Meta(description="longest input in tokens, longer is 400; by default the model's own limit"),
    ] = None
    pooling: Annotated[
        Literal["cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"] | None,
        Meta(description="override the pooling that the model's own files declare"),
    ] = None
    normalize: Annotated[
        bool | None, Meta(description="true or false: override whether the model's own files normalize its vectors")
    ] = None
    matryoshka_dimensions: Annotated[
        tuple[str, ...],
        Meta(description="sizes that `dimensions` may ask for (64,128), or any; by default what the model declares"),
    ] = ()
    trust_remote_code: Annotated[bool, Meta(description="run Python code that comes with the model")] = False
    allow_pickle_weights: Annotated[
        bool, Meta(description="load weights from pickle files, which can run code, when there is no safetensors file")
    ] = False
    cuda_graph_config: Annotated[
        dict[str, Any] | None,
        Meta(
            description="CUDA graphs to capture at start on a GPU: the lists batch_sizes, num_tokens and seq_lens (or "
            "max_batch_size, max_num_token and max_seq_len, up to which they are generated), and enable_padding",
            extra={"yaml_only": True},
        ),
    ] = None


class BatchingSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a batch leaves, and how much may wait."""

    max_batch_size: Annotated[
        int, Meta(ge=1, le=MAX_BATCH_INPUTS, description="most inputs in one forward pass; a full batch leaves at once")
    ] = 32
    max_num_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | Literal["auto"],
        Meta(description="most tokens in one forward pass; auto sizes it from free memory, and on a GPU from measured speed"),
    ] = 8192
    max_queue_delay: Annotated[
        Annotated[float, Meta(ge=0, le=60)] | Literal["auto"],
        Meta(
            description="seconds that the oldest waiting input is held for others to join; auto holds at most 0.005, and "
            "only while recent arrivals make company likely"
        ),
    ] = "auto"
    max_queue_size: Annotated[int, Meta(ge=1, le=10_000_000, description="inputs waiting at which new requests get 429")] = 2048


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where and how the frontends listen, and what they accept."""

    host: Annotated[str, Meta(description="address to listen on", min_length=1)] = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65_535, description="port to listen on")] = 8000
    uds: Annotated[str | None, Meta(description="listen on this Unix socket instead of host and port")] = None
    num_frontends: Annotated[int, Meta(ge=1, le=MAX_FRONTENDS, description="HTTP processes sharing the port")] = 1
    max_inputs: Annotated[int, Meta(ge=1, le=MAX_INPUTS, description="most inputs in one HTTP request")] = 2048
    max_body_bytes: Annotated[int, Meta(ge=1, le=1 << 30, description="larger request bodies get 413; takes KiB, MiB, GiB")] = (
        32 << 20
    )
    request_timeout: Annotated[Seconds, Meta(description="seconds a request may take in all; then 504")] = 60.0
    keep_alive: Annotated[
        Seconds, Meta(description="seconds an idle connection is kept open, or one whose client takes nothing of its answer")
    ] = 75.0
    receive_timeout: Annotated[
        Seconds, Meta(description="seconds to receive a whole request, plus one per MiB of body; then 408")
    ] = 10.0
    max_connections: Annotated[
        int, Meta(ge=1, le=1_000_000, description="open connections per frontend; one more gets 503")
    ] = 4096
    api_key: Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...],
        Meta(description="accept this Bearer key; visible in `ps`, prefer api_key_file", extra={"secret": True}),
    ] = ()
    api_key_file: Annotated[str | None, Meta(description="file of accepted Bearer keys, one a line")] = None
    cors_allow_origin: Annotated[tuple[str, ...], Meta(description="origins of browser pages that may call the API, or *")] = ()
    ssl_keyfile: Annotated[str | None, Meta(description="private key for HTTPS (PEM)")] = None
    ssl_certfile: Annotated[str | None, Meta(description="certificate chain for HTTPS (PEM)")] = None
    root_path: Annotated[str, Meta(description="path prefix under which a proxy serves Packhorse")] = ""
    otlp_traces_endpoint: Annotated[
        str | None,
        Meta(
            description="OTLP/HTTP address of an OpenTelemetry collector (http://localhost:4318/v1/traces) that gets a trace "
            "of each request; needs the `otel` extra"
        ),
    ] = None


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which devices run the model, and when a worker counts as lost."""

    devices: Annotated[
        tuple[str, ...],
        Meta(
            description="auto (every visible GPU, else cpu), cpu, or a list of indexes, GPU UUIDs or MIG UUIDs, handed to "
            "CUDA_VISIBLE_DEVICES as they are"
        ),
    ] = ("auto",)
    workers_per_device: Annotated[int, Meta(ge=1, le=MAX_PROCESSES, description="worker processes per device")] = 1
    worker_timeout: Annotated[
        Seconds, Meta(description="seconds without a beat after which a worker is killed (after 1 its work is moved)")
    ] = 10.0
    batch_timeout: Annotated[Seconds, Meta(description="seconds a batch may run before its worker is killed")] = 30.0


class ProcessSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all processes share: where they meet, how they stop, how they log."""

    run_dir: Annotated[
        str | None,
        Meta(
            description="private folder of sockets, settings and logs; by default $XDG_RUNTIME_DIR/packhorse-PORT, else "
            "/tmp/packhorse-UID-PORT"
        ),
    ] = None
    broker: Annotated[
        str | None,
        Meta(
            description="tcp://HOST:PORT at which the broker takes workers of other machines too (tcp://*:5600); for "
            "`packhorse worker`, the broker to join; needs curve_keys"
        ),
    ] = None
    curve_keys: Annotated[str | None, Meta(description="folder of CURVE keys for broker, made by `packhorse keys`")] = None
    shutdown_grace: Annotated[
        Annotated[float, Meta(gt=0, le=MAX_SHUTDOWN_GRACE_S)],
        Meta(description="seconds that accepted requests get to finish at a stop"),
    ] = 30.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="least level of log lines to write")
    ] = "info"
    log_format: Annotated[Literal["text", "json"], Meta(description="json for machines")] = "text"


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that can be set, by section."""

    model: ModelSettings = ModelSettings()
    batching: BatchingSettings = BatchingSettings()
    http: HttpSettings = HttpSettings()
    workers: WorkerSettings = WorkerSettings()
    process: ProcessSettings = ProcessSettings()

    def without_secrets(self) -> Settings:
        """The same settings with no API key, fit to be written down for workers that join later."""
        return msgspec.structs.replace(self, http=msgspec.structs.replace(self.http, api_key=()))


SECTIONS: dict[str, str] = {
    "model": "Model",
    "batching": "Batching",
    "http": "HTTP",
    "workers": "Workers",
    "process": "Processes and logs",
}
"""Field of ``Settings`` to the heading under which ``--help`` and the docs list its settings."""


class Flag(msgspec.Struct, frozen=True, kw_only=True):
    """One setting as the command line, the environment and the docs show it."""

    name: str
    section: str
    type: Any
    """The field's whole annotation, bounds included: what ``msgspec.convert`` takes."""
    default: Any
    description: str
    repeatable: bool
    is_switch: bool
    """A bool that is off by default: ``--name`` alone turns it on."""
    yaml_only: bool
    secret: bool

    @property
    def variable(self) -> str:
        """The environment variable of this setting."""
        return f"PACKHORSE_{self.name.upper()}"

    @property
    def choices(self) -> tuple[str, ...]:
        """The words this setting takes, where it takes words only."""
        kind = msgspec.inspect.type_info(self.type)
        while isinstance(kind, msgspec.inspect.Metadata):
            kind = kind.type
        kinds = kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)
        return tuple(str(word) for each in kinds if isinstance(each, msgspec.inspect.LiteralType) for word in each.values)


def flags() -> dict[str, Flag]:
    """Every setting by its name, in the order of the tree. Names are unique across sections."""
    found: dict[str, Flag] = {}
    for section in SECTIONS:
        section_type = type(getattr(Settings(), section))
        hints = _hints(section_type)
        for field in msgspec.structs.fields(section_type):
            meta = _meta(hints[field.name])
            extra = meta.extra or {}
            found[field.name] = Flag(
                name=field.name,
                section=section,
                type=hints[field.name],
                default=field.default,
                description=meta.description or "",
                repeatable=isinstance(field.default, tuple),
                is_switch=field.default is False,
                yaml_only=bool(extra.get("yaml_only")),
                secret=bool(extra.get("secret")),
            )
    return found


def _hints(section_type: type) -> dict[str, Any]:
    from typing import get_type_hints  # noqa: PLC0415 (needed only while the table is made)

    return get_type_hints(section_type, include_extras=True)


def _meta(hint: Any) -> Meta:
    """The outermost description of a field; nested Meta carry bounds only."""
    for each in reversed(getattr(hint, "__metadata__", ())):
        if isinstance(each, Meta) and each.description is not None:
            return each
    raise TypeError(f"a setting without a description: {hint}")


def encode_settings(settings: Settings) -> bytes:
    """Settings as JSON, without secrets: what the broker leaves in the run directory for workers that join."""
    return msgspec.json.format(msgspec.json.encode(settings.without_secrets()), indent=2)


def decode_settings(path: Path) -> Settings:
    """Read what ``encode_settings`` wrote. Raises msgspec.ValidationError or OSError."""
    return msgspec.json.decode(path.read_bytes(), type=Settings)
