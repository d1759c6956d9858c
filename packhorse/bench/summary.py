"""From samples to figures. These structs are what ``--json`` writes; every latency is in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from packhorse.bench.samples import SERVER_TIMES, Samples
from packhorse.bench.target import Target

Values = NDArray[np.float64]


class Spread(msgspec.Struct, frozen=True):
    """How a time is spread over requests, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class FailureKind(msgspec.Struct, frozen=True):
    """Failures of one kind."""

    kind: str
    count: int
    is_transport: bool
    example: str


class Client(msgspec.Struct, frozen=True):
    """Whether the load generator itself was in the way."""

    cpu_share: float
    """Of one core."""
    loop_lag_p99_ms: float
    """How late its event loop ran what was due."""
    late_p99_ms: float | None
    """How late it sent, in an open loop; it is part of the latency."""
    late_max_ms: float | None
    waited_for_connection: int
    never_sent: int


class Figures(msgspec.Struct, frozen=True):
    """What one server did, in all slices together or in one."""

    seconds: float
    """How long it was loaded."""
    answered: int
    refused: int
    """429."""
    failed: int
    abandoned: int
    """Open when the run was interrupted."""
    requests_per_s: float
    """Answered ones. What was open at the end of a slice counts with the part of its time that lay inside."""
    inputs_per_s: float
    tokens_per_s: float | None
    """As the server counts them; None when it does not tell."""
    latency_ms: Spread | None
    server_ms: dict[str, Spread]
    """What the server tells of its own work, where it does."""


class ServerReport(msgspec.Struct, frozen=True):
    """One server."""

    url: str
    model: str | None
    max_seq_len: int | None
    total: Figures
    rounds: list[Figures]
    failures: list[FailureKind]
    refusal: str
    client: Client


def report_of(target: Target, slices: Sequence[Samples], is_open_loop: bool) -> ServerReport:
    """All about one server. ``slices`` holds at least one."""
    rounds = [figures_of([each]) for each in slices]
    refusal = next((each.refusal for each in slices if each.refusal), "")
    return ServerReport(
        target.url,
        target.model,
        target.max_seq_len,
        figures_of(slices),
        rounds,
        _failures(slices),
        refusal,
        _client(slices, is_open_loop),
    )


def figures_of(slices: Sequence[Samples]) -> Figures:
    """The figures of these slices together."""
    seconds = sum(each.stopped_at - each.begun_at for each in slices)
    inside = np.concatenate([_share_inside(each) for each in slices])
    inputs = np.concatenate([np.asarray(each.inputs, dtype=np.float64) for each in slices])
    answered, weight = len(inside), float(inside.sum())
    tokens = sum(each.tokens for each in slices)
    server = {name: np.concatenate([_array(each.server_ms[name]) for each in slices]) for name in SERVER_TIMES}
    spreads = {name: _spread(values[~np.isnan(values)]) for name, values in server.items()}
    return Figures(
        seconds=seconds,
        answered=answered,
        refused=sum(each.refused for each in slices),
        failed=sum(each.failed for each in slices),
        abandoned=sum(each.abandoned for each in slices),
        requests_per_s=weight / seconds,
        inputs_per_s=float(inside @ inputs) / seconds,
        tokens_per_s=tokens * (weight / answered) / seconds if tokens else None,
        latency_ms=_spread(1000 * np.concatenate([latencies_s(each) for each in slices])),
        server_ms={name: spread for name, spread in spreads.items() if spread is not None},
    )


def latencies_s(samples: Samples) -> Values:
    """From when a request was due to the last byte of its answer."""
    return _array(samples.took) + _array(samples.late)


def _share_inside(samples: Samples) -> Values:
    """The part of each request's time that lay inside the slice: of a slice shorter than its requests, rates are right too."""
    ended, took = _array(samples.ended), np.maximum(_array(samples.took), 1e-6)
    beyond = np.clip(ended - (samples.stopped_at - samples.begun_at), 0, took)
    return 1 - beyond / took


def _spread(values_ms: Values) -> Spread | None:
    if not len(values_ms):
        return None
    p50, p90, p95, p99 = np.percentile(values_ms, (50, 90, 95, 99)).tolist()
    return Spread(float(values_ms.mean()), p50, p90, p95, p99, float(values_ms.max()))


def _failures(slices: Sequence[Samples]) -> list[FailureKind]:
    kinds = dict.fromkeys(kind for each in slices for kind in each.failures)
    found = []
    for kind in kinds:
        of_kind = [each.failures[kind] for each in slices if kind in each.failures]
        count = sum(each.count for each in of_kind)
        found.append(FailureKind(kind, count, of_kind[0].is_transport, of_kind[0].example))
    return sorted(found, key=lambda each: -each.count)


def _client(slices: Sequence[Samples], is_open_loop: bool) -> Client:
    lags = np.concatenate([_array(each.loop_lag) for each in slices])
    late = np.concatenate([_array(each.late) for each in slices])
    tells = is_open_loop and len(late) > 0
    return Client(
        cpu_share=max(each.cpu_share for each in slices),
        loop_lag_p99_ms=1000 * float(np.percentile(lags, 99)) if len(lags) else 0.0,
        late_p99_ms=1000 * float(np.percentile(late, 99)) if tells else None,
        late_max_ms=1000 * float(late.max()) if tells else None,
        waited_for_connection=sum(each.waited_for_connection for each in slices),
        never_sent=sum(each.never_sent for each in slices),
    )


def _array(values: Any) -> Values:
    return np.asarray(values, dtype=np.float64)
