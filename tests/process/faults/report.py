"""What became of the requests of a load, and whether that is what every user was promised."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import orjson

from questions import Question

MARGIN_S = 1.0
"""An answer comes within the request's timeout and this much."""
HUNG = "hung"
_LONGEST_RETRY_AFTER_S = 120
"""OpenAI's clients obey no longer one."""


@dataclass(slots=True, eq=False)
class Sent:
    """One request and its end. Times are of the machine's monotonic clock, in seconds."""

    number: int
    question: Question
    due: float
    """When it was meant to be sent; ``sent`` is when it was: the difference is the client's own lag."""
    sent: float = 0.0
    ended: float = 0.0
    local_port: int = 0
    """The client's side of its connection."""
    status: int = 0
    """0 where there was no answer: then ``problem`` says why."""
    problem: str = ""
    """Type of the transport error, or ``hung``."""
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""
    """Of an answer other than 200."""
    is_own: bool = True
    """Whether the vectors of a 200 are those of its own inputs."""

    @property
    def seconds(self) -> float:
        return self.ended - self.sent

    @property
    def outcome(self) -> int | str:
        return self.status or self.problem

    @property
    def retry_after_s(self) -> int | None:
        found = self.headers.get(b"retry-after", b"")
        return int(found) if found.isdigit() else None

    @property
    def code(self) -> str | None:
        """``error.code`` of the answer."""
        try:
            return str(orjson.loads(self.body)["error"]["code"])
        except (ValueError, KeyError, TypeError):
            return None

    def faults(self, timeout_s: float) -> list[str]:
        """What is wrong with how this request ended."""
        if self.problem:
            return [f"no answer: {self.problem}"]
        found = []
        if self.seconds > timeout_s + MARGIN_S:
            found.append(f"took {self.seconds:.2f} s")
        if b"x-request-id" not in self.headers:
            found.append("no x-request-id")
        if self.status == 200:
            return found if self.is_own else [*found, "wrong vectors"]
        if not _is_envelope(self.body):
            found.append(f"no error envelope: {self.body[:200]!r}")
        if self.status in (429, 503) and not 1 <= (self.retry_after_s or 0) <= _LONGEST_RETRY_AFTER_S:
            found.append(f"retry-after is {self.headers.get(b'retry-after')!r}")
        return found


@dataclass(frozen=True)
class Report:
    """The requests of a load that have ended, in the order of their sending."""

    sent: Sequence[Sent]
    strays: Sequence[bytes]
    """What came on a connection behind an answer, or without a request: a second answer would be here."""

    @property
    def counts(self) -> Counter[int | str]:
        """How many had each status, or each transport problem."""
        return Counter(each.outcome for each in self.sent)

    def of(self, *outcomes: int | str) -> Report:
        """Those with one of these statuses or problems."""
        return self.where(lambda each: each.outcome in outcomes)

    def between(self, start: float, end: float) -> Report:
        """Those sent in a span of time."""
        return self.where(lambda each: start <= each.sent < end)

    def within(self, start: float, end: float) -> Report:
        """Those sent and ended in a span of time: what happened behind it did not touch them."""
        return self.where(lambda each: start <= each.sent and each.ended < end)

    def where(self, keeps: Callable[[Sent], bool]) -> Report:
        return Report([each for each in self.sent if keeps(each)], self.strays)

    @property
    def slowest_s(self) -> float:
        return max((each.seconds for each in self.sent), default=0.0)

    def percentile_s(self, percent: float) -> float:
        """The time that so many percent of the requests took at most."""
        ranked = sorted(each.seconds for each in self.sent)
        return ranked[min(len(ranked) - 1, int(len(ranked) * percent / 100))] if ranked else 0.0

    @property
    def lag_s(self) -> float:
        """How late the client itself was at worst: what it measured is no better than this."""
        return max((each.sent - each.due for each in self.sent), default=0.0)

    def faults(self, timeout_s: float = 60.0, *, may_be_lost: Callable[[Sent], bool] | None = None) -> list[str]:
        """Every break of the invariant: exactly one answer each, its own vectors or a clear refusal, in time."""
        found = [f"bytes behind an answer: {each[:200]!r}" for each in self.strays]
        for each in self.sent:
            if each.problem and each.problem != HUNG and may_be_lost is not None and may_be_lost(each):
                continue
            found += [f"request {each.number}, {each.outcome}: {fault}" for fault in each.faults(timeout_s)]
        return found

    def assert_invariant(self, timeout_s: float = 60.0, *, may_be_lost: Callable[[Sent], bool] | None = None) -> None:
        """``may_be_lost`` says which requests may end without an answer, because the process that had them was killed."""
        found = self.faults(timeout_s, may_be_lost=may_be_lost)
        assert not found, f"{len(found)} faults among {len(self.sent)} requests {dict(self.counts)}:\n" + "\n".join(found[:20])

    def __str__(self) -> str:
        times = ", ".join(f"p{percent:g} {1000 * self.percentile_s(percent):.1f}" for percent in (50, 99, 99.9))
        return f"{dict(self.counts)}; ms: {times}, slowest {1000 * self.slowest_s:.1f}, lag {1000 * self.lag_s:.1f}"


def joined(reports: Iterable[Report]) -> Report:
    """Several loads as one."""
    found = list(reports)
    return Report(
        sorted((each for report in found for each in report.sent), key=lambda each: each.sent),
        [each for report in found for each in report.strays],
    )


def _is_envelope(body: bytes) -> bool:
    try:
        error = orjson.loads(body)["error"]
        return set(error) == {"message", "type", "param", "code"} and bool(error["message"])
    except (ValueError, KeyError, TypeError):
        return False
