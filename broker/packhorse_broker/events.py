"""What happened (events, past tense) and what must be done (actions, orders). All frozen; the core turns one into the other."""

from __future__ import annotations

import msgspec

from packhorse_shared import messages as m
from packhorse_shared.codec import Buffer

Payload = tuple[Buffer, ...]
"""Pieces of a payload in order; the loop joins them as it sends."""


class _Frozen(msgspec.Struct, frozen=True):
    """Common base of events and actions."""


# ---- events: from frontends ----


class FrontendGreeted(_Frozen, frozen=True):
    """A frontend said hello."""

    frontend: bytes
    hello: m.FrontendHello


class RequestsSubmitted(_Frozen, frozen=True):
    """A frontend sent requests; the payload holds the ids of all their inputs, joined."""

    frontend: bytes
    requests: list[m.SubmittedRequest]
    payload: Buffer


class RequestsCancelled(_Frozen, frozen=True):
    """A frontend no longer wants these requests."""

    frontend: bytes
    rids: list[int]


class FrontendPinged(_Frozen, frozen=True):
    """A frontend asked how things are."""

    frontend: bytes


class FrontendTallied(_Frozen, frozen=True):
    """A frontend tells what it has counted since it last did: (cell, amount) each, of ``meter.py``."""

    frontend: bytes
    changes: list[tuple[int, float]]


class FrontendLost(_Frozen, frozen=True):
    """A frontend's process ended, or it cannot be reached."""

    frontend: bytes
    reason: str


class StatusAsked(_Frozen, frozen=True):
    """Somebody, known or not, asked for the status on the frontends' socket."""

    peer: bytes


class MetricsAsked(_Frozen, frozen=True):
    """Likewise for the metrics."""

    peer: bytes


# ---- events: from workers ----


class WorkerAnnounced(_Frozen, frozen=True):
    """A worker exists and loads its model."""

    worker: bytes
    announce: m.WorkerAnnounce
    key_name: str = ""
    """Of the key that it showed as it connected; empty for a worker of this machine, which shows a token."""


class WorkerGreeted(_Frozen, frozen=True):
    """A worker has loaded and wants work."""

    worker: bytes
    hello: m.WorkerHello
    key_name: str = ""
    """As in ``WorkerAnnounced``."""


class WorkerOutdated(_Frozen, frozen=True):
    """A worker's hello is of another version of the protocol, older or newer, and cannot be read."""

    worker: bytes
    version: int


class WorkerDisallowed(_Frozen, frozen=True):
    """A message came from a worker whose key was taken away while it was connected."""

    worker: bytes


class WorkerBeat(_Frozen, frozen=True):
    """A worker's sign of life."""

    worker: bytes
    beat: m.Beat


class BatchFinished(_Frozen, frozen=True):
    """A worker sent the rows of a batch."""

    worker: bytes
    done: m.Done
    payload: Buffer


class BatchBroke(_Frozen, frozen=True):
    """A worker could not run a batch, and no single input is to blame."""

    worker: bytes
    failed: m.BatchFailed


class WorkerDrained(_Frozen, frozen=True):
    """A worker was told to stop: it finishes what runs and hands back what it has not begun."""

    worker: bytes
    returned: list[int]


class WorkerLeft(_Frozen, frozen=True):
    """A worker said bye."""

    worker: bytes
    reason: str


class WorkerLost(_Frozen, frozen=True):
    """A worker's process ended, or it cannot be reached."""

    worker: bytes
    reason: str


class WorkerUnreachable(_Frozen, frozen=True):
    """The link to a worker of another machine is cut; whether it lives cannot be told."""

    worker: bytes


# ---- events: from the broker's own process ----


class TimePassed(_Frozen, frozen=True):
    """The end of a wake-up: limits of time are looked at, and batches leave. Handled once after all other events."""


class BrokerStalled(_Frozen, frozen=True):
    """The broker itself did not run for a while (a stopped process, a sleeping machine): nobody's silence counts."""

    stalled_s: float


class DrainBegan(_Frozen, frozen=True):
    """The broker was told to stop."""


Event = (
    FrontendGreeted
    | RequestsSubmitted
    | RequestsCancelled
    | FrontendPinged
    | FrontendTallied
    | FrontendLost
    | StatusAsked
    | MetricsAsked
    | WorkerAnnounced
    | WorkerGreeted
    | WorkerOutdated
    | WorkerDisallowed
    | WorkerBeat
    | BatchFinished
    | BatchBroke
    | WorkerDrained
    | WorkerLeft
    | WorkerLost
    | WorkerUnreachable
    | TimePassed
    | BrokerStalled
    | DrainBegan
)


# ---- actions ----


class SendBatch(_Frozen, frozen=True):
    """Hand a batch to a worker."""

    worker: bytes
    work: m.Work
    payload: Payload


class SendResult(_Frozen, frozen=True):
    """Send the rows of a batch that belong to one frontend."""

    frontend: bytes
    result: m.Result
    payload: Payload


class FailRequest(_Frozen, frozen=True):
    """Tell a frontend that a request failed as a whole."""

    frontend: bytes
    failure: m.RequestFailure


class TellFrontend(_Frozen, frozen=True):
    """Send a message without a payload to a peer of the frontends' socket."""

    peer: bytes
    message: m.BrokerState | m.StatusReport | m.MetricsReport | m.Introduce


class TellWorker(_Frozen, frozen=True):
    """Send a message without a payload to a peer of the workers' socket."""

    peer: bytes
    message: m.Join | m.Refused | m.Drain | m.Introduce


class WatchFrontend(_Frozen, frozen=True):
    """Report ``FrontendLost`` when this process ends."""

    frontend: bytes
    pid: int


class WatchWorker(_Frozen, frozen=True):
    """Report ``WorkerLost`` when this process ends. ``pid`` is 0 for one of another machine: it cannot be watched."""

    worker: bytes
    pid: int


class UnwatchFrontend(_Frozen, frozen=True):
    """Nothing is expected of this frontend any more: its process is no longer watched."""

    frontend: bytes


class KillWorker(_Frozen, frozen=True):
    """End a worker's process with SIGKILL; one that is not watched, because it is of another machine, is told to end itself.
    Whoever started it starts another."""

    worker: bytes
    pid: int
    reason: str


class WriteLog(_Frozen, frozen=True):
    """Write one log line."""

    level: int
    """As in the logging module: 20 info, 30 warning, 40 error."""
    message: str
    fields: tuple[tuple[str, str | int | float], ...] = ()


class Stop(_Frozen, frozen=True):
    """The drain is over: end the process."""


Action = (
    SendBatch
    | SendResult
    | FailRequest
    | TellFrontend
    | TellWorker
    | WatchFrontend
    | WatchWorker
    | UnwatchFrontend
    | KillWorker
    | WriteLog
    | Stop
)

INFO = 20
WARNING = 30
ERROR = 40
