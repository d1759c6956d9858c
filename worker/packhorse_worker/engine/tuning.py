"""How many tokens one forward may hold, from what a few forwards took: the choice behind ``--max_num_tokens auto`` on a GPU.

Memory sets what fits, speed what is worth it: beyond the point where a forward is as fast per token as it gets, more tokens
only make everyone in it wait longer. Pure; ``measuring`` has the forwards.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from packhorse_worker.engine.memory import FEWEST_TOKENS, MOST_TOKENS

STEP = 64
_GOOD_ENOUGH = 0.95
"""A forward that reaches this share of the best throughput is preferred to a larger one."""


@dataclass(frozen=True)
class Sample:
    """What a forward took."""

    tokens: int
    seconds: float
    peak_bytes: int
    """Memory at the most, beside what was held before it."""

    @property
    def tokens_per_s(self) -> float:
        """Throughput."""
        return self.tokens / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class Samples:
    """What forwards of growing sizes took."""

    typical: Sequence[Sample] = ()
    """Of many inputs of a usual length, fewest tokens first."""
    long: Sequence[Sample] = ()
    """Of one input, shortest first: attention may need memory that grows with the square of its length."""
    ended: str = ""
    """Why there are no more of them; empty where all sizes were run."""


@dataclass(frozen=True)
class Choice:
    """A size for forwards, and why."""

    tokens: int
    reason: str


def choose(samples: Samples, budget_bytes: int, longest: int) -> Choice:
    """The tokens of the smallest forward within 5 % of the best throughput of those that fit into ``budget_bytes``; more where
    one input of ``longest`` tokens needs and gets more.

    A multiple of 64 from 512, whatever fits, to 16384. Never falls when the memory grows.
    """
    assert samples.typical, "nothing was measured"
    fits = most_that_fit(samples, budget_bytes, longest)
    sizes = [each for each in samples.typical if each.tokens <= fits]
    best = max((each.tokens_per_s for each in sizes), default=0.0)
    enough = next((each for each in sizes if each.tokens_per_s >= _GOOD_ENOUGH * best), None)
    fast = _up(enough.tokens) if enough else FEWEST_TOKENS
    one = _up(min(longest, MOST_TOKENS))
    tokens = max(FEWEST_TOKENS, min(max(fast, one), fits))
    measured = f"measured {samples.typical[0].tokens} to {samples.typical[-1].tokens}"
    if samples.ended:
        measured += f", then {samples.ended}"
    speed = f"{enough.tokens_per_s:,.0f} tokens/s at {enough.tokens}, at best {best:,.0f}" if enough else "none of them fits"
    parts = [measured, speed, f"{fits} fit into {budget_bytes / (1 << 30):.1f} GiB"]
    if tokens > fast:
        parts.append(f"one input may have {min(longest, tokens)}")
    return Choice(tokens, "; ".join(parts))


def most_that_fit(samples: Samples, budget_bytes: int, longest: int) -> int:
    """Tokens, a multiple of 64 up to 16384, of the largest forward that fits, whether of usual inputs or of long ones, of up to
    ``longest`` tokens; 0 where none does."""
    longest = min(longest, MOST_TOKENS)
    bounds = [float(MOST_TOKENS)]
    bounds += [each.tokens - 1 for each in (*samples.typical, *samples.long) if each.peak_bytes > budget_bytes]
    if samples.typical:
        fixed, slope = line(samples.typical)
        bounds.append((budget_bytes - fixed) / slope if slope > 0 else math.inf)
    if samples.long:
        bounds.append(_long_that_fit(samples.long, budget_bytes, longest))
    return max(0, int(min(bounds)) // STEP * STEP)


def line(samples: Sequence[Sample]) -> tuple[float, float]:
    """Bytes of a forward whatever its size, and bytes of each token.

    The slope is the median of those between any two samples, so that one odd sample does not move it; the fixed part is the
    largest that any sample leaves, so that none was larger than the line says.
    """
    pairs = [(one, other) for one, other in itertools.combinations(samples, 2) if one.tokens != other.tokens]
    if not pairs:
        return 0.0, max(each.peak_bytes / each.tokens for each in samples)
    slope = statistics.median((other.peak_bytes - one.peak_bytes) / (other.tokens - one.tokens) for one, other in pairs)
    slope = max(0.0, slope)
    return max(0.0, *(each.peak_bytes - slope * each.tokens for each in samples)), slope


def _long_that_fit(samples: Sequence[Sample], budget_bytes: int, longest: int) -> float:
    """Tokens of forwards of long inputs. Where the longest input was run, that is of several of them, each with its memory;
    else of one input longer than those that were run, whose memory grows with the square of its length at worst."""
    good = [each for each in samples if each.peak_bytes <= budget_bytes]
    if not good:
        return 0.0
    room = budget_bytes / max(1, good[-1].peak_bytes)
    return good[-1].tokens * (room if good[-1].tokens >= longest else math.sqrt(room))


def _up(tokens: int) -> int:
    return -(-tokens // STEP) * STEP
