"""What the compute thread tells the I/O thread, and who the worker is to the broker."""

from __future__ import annotations

from dataclasses import dataclass

from packhorse_shared.codec import Buffer, Header
from packhorse_shared.messages import ModelFacts, WorkerLimits


@dataclass(frozen=True)
class WorkerIdentity:
    """Who this worker is to the broker."""

    slot: int
    """Its slot under supervisord; -1 for one started by hand."""
    device: str
    pid: int
    incarnation: int
    supervised: bool
    """Whether supervisord stops it: then it waits for a broker for ever."""


@dataclass(frozen=True)
class Ready:
    """The model is loaded and warmed up."""

    facts: ModelFacts
    limits: WorkerLimits


@dataclass(frozen=True)
class Answer:
    """What became of a batch."""

    message: Header
    payload: Buffer


@dataclass(frozen=True)
class Finish:
    """The compute thread has ended; with a reason it never could begin."""

    reason: str


@dataclass(frozen=True)
class Break:
    """The compute thread has ended and the broker must take it for dead."""

    at_once: bool = False
    """It has not ended, and may never: the process must not wait for it."""


Order = Ready | Answer | Finish | Break
