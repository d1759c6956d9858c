"""Which shapes are captured as CUDA graphs, and which of them a batch runs in. Pure; no torch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from packhorse_shared.graph_config import EncodeCudaGraphConfig, GraphConfigError
from packhorse_worker.engine.graphs.generation import DEFAULT_BATCH_SIZE, batch_sizes_to, num_tokens_to, seq_lens_to
from packhorse_worker.engine.packing import Shape

MAX_GRAPHS = 4096
"""Each costs a start some ten milliseconds and some memory."""

_LIMIT_OF = {"batch_sizes": "max_batch_size", "num_tokens": "max_num_tokens", "seq_lens": "max_seq_len"}
"""The list, and the engine's limit for its entries."""


@dataclass(frozen=True)
class Lists:
    """Sizes, each list rising. ``changes`` says what of them was over a limit and what became of it, "" for nothing."""

    batch_sizes: tuple[int, ...]
    num_tokens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    changes: str = ""

    def first_seq_len(self, num_tokens: int, batch_size: int) -> int:
        """Index of the first longest input with which so many inputs can have so many tokens; past the list if none is."""
        return bisect_left(self.seq_lens, -(-num_tokens // batch_size))

    def end_seq_len(self, num_tokens: int) -> int:
        """Index behind the last longest input that fits into so many tokens."""
        return bisect_right(self.seq_lens, num_tokens)

    def count(self) -> int:
        """How many combinations a batch can have; see ``shapes``."""
        pairs = ((t, b) for t in self.num_tokens for b in self.batch_sizes if b <= t)
        return sum(max(0, self.end_seq_len(t) - self.first_seq_len(t, b)) for t, b in pairs)

    def shapes(self) -> list[Shape]:
        """Every combination with batch <= tokens <= batch * longest and longest <= tokens, the largest first."""
        pairs = ((t, b) for t in reversed(self.num_tokens) for b in reversed(self.batch_sizes) if b <= t)
        ends = {t: self.end_seq_len(t) for t in self.num_tokens}
        return [Shape(t, b, s) for t, b in pairs for s in self.seq_lens[self.first_seq_len(t, b) : ends[t]][::-1]]


@dataclass(frozen=True, eq=False)
class Buckets:
    """The shapes to capture, and the choice among them."""

    lists: Lists
    shapes: tuple[Shape, ...]
    """The largest first, in the order of ``Shape``."""
    enable_padding: bool
    why_none: str = ""
    """Where ``shapes`` is empty: why, and what to give, for one warning."""

    @classmethod
    def of(cls, config: EncodeCudaGraphConfig, max_batch_size: int, max_num_tokens: int, max_seq_len: int) -> Self:
        """The buckets of a configuration within the engine's limits.

        What is over a limit is clamped to it, once, or without padding dropped (``lists.changes`` tells): padding fills a batch
        up to the limit, but an exact match there is as rare as anywhere. Raises GraphConfigError when there are too many.
        """
        missing = _missing(config)
        if missing:
            return cls(Lists((), (), ()), (), config.enable_padding, missing)
        limits = {"max_batch_size": max_batch_size, "max_num_tokens": max_num_tokens, "max_seq_len": max_seq_len}
        lists = _within(config, limits)
        count = lists.count()
        if count > MAX_GRAPHS:
            raise GraphConfigError(
                None, f"asks for {count} graphs, limit {MAX_GRAPHS}: every combination becomes one; give shorter lists"
            )
        return cls(lists, tuple(lists.shapes()), config.enable_padding, "" if count else _why_none(lists))

    def find(self, batch_size: int, num_tokens: int, seq_len: int) -> Shape | None:
        """The captured shape that a batch runs in, or None: it runs eagerly.

        With padding the smallest, in the order of ``Shape``, that has room for the batch and for one token of each dummy that
        makes up for missing inputs; without it the very shape of the batch. The batch is one that exists: no fewer tokens than
        inputs, none longer than all tokens.
        """
        if not self.enable_padding:
            return self._exactly(batch_size, num_tokens, seq_len)
        lists = self.lists
        batches = bisect_left(lists.batch_sizes, batch_size)
        lengths = bisect_left(lists.seq_lens, seq_len)
        if batches == len(lists.batch_sizes) or lengths == len(lists.seq_lens):
            return None
        least = max(num_tokens + lists.batch_sizes[batches] - batch_size, lists.seq_lens[lengths])
        for index in range(bisect_left(lists.num_tokens, least), len(lists.num_tokens)):
            tokens = lists.num_tokens[index]
            # So few inputs could not have so many tokens, if the longest graph that the tokens allow is the longest of them.
            fewest = -(-tokens // lists.seq_lens[lists.end_seq_len(tokens) - 1])
            at = max(batches, bisect_left(lists.batch_sizes, fewest))
            if at < len(lists.batch_sizes) and num_tokens + lists.batch_sizes[at] - batch_size <= tokens:
                batch = lists.batch_sizes[at]
                return Shape(tokens, batch, lists.seq_lens[max(lengths, lists.first_seq_len(tokens, batch))])
        return None

    def _exactly(self, batch_size: int, num_tokens: int, seq_len: int) -> Shape | None:
        lists = self.lists
        wanted = ((lists.batch_sizes, batch_size), (lists.num_tokens, num_tokens), (lists.seq_lens, seq_len))
        for sizes, size in wanted:
            at = bisect_left(sizes, size)
            if at == len(sizes) or sizes[at] != size:
                return None
        return Shape(num_tokens, batch_size, seq_len)


def _missing(config: EncodeCudaGraphConfig) -> str:
    """Why there is nothing to capture at all, or ""."""
    missing = []
    if config.num_tokens is None and config.max_num_token is None:
        missing.append("num_tokens (or max_num_token)")
    if config.seq_lens is None and config.max_seq_len is None:
        missing.append("seq_lens (or max_seq_len)")
    if not missing:
        return ""
    return f"cuda_graph_config lacks {' and '.join(missing)}: no graph is captured, every batch runs eagerly"


def _within(config: EncodeCudaGraphConfig, limits: Mapping[str, int]) -> Lists:
    """The lists of a configuration, given or generated, within the limits."""
    most = config.max_batch_size or DEFAULT_BATCH_SIZE
    lists = {
        "batch_sizes": config.batch_sizes or batch_sizes_to(most, with_padding=config.enable_padding),
        "num_tokens": config.num_tokens or num_tokens_to(config.max_num_token or 0),
        "seq_lens": config.seq_lens or seq_lens_to(config.max_seq_len or 0),
    }
    changes = []
    for name, limit in _LIMIT_OF.items():
        over = [size for size in lists[name] if size > limits[limit]]
        kept = tuple(size for size in lists[name] if size <= limits[limit])
        if not over:
            continue
        if config.enable_padding and limits[limit] not in kept:
            kept = (*kept, limits[limit])
        lists[name] = kept
        if name != "batch_sizes" or config.batch_sizes or config.max_batch_size:
            changes.append(_told(name, over, limit, limits[limit], "clamped" if config.enable_padding else "dropped"))
    return Lists(**lists, changes="; ".join(changes))


def _told(name: str, over: list[int], limit: str, value: int, what: str) -> str:
    sizes = f"{len(over)} sizes from {over[0]} to {over[-1]}" if len(over) > 1 else str(over[0])
    return f"{name}: {sizes} over {limit} ({value}), {what}"


def _why_none(lists: Lists) -> str:
    found = [f"{name}: none within {limit}" for name, limit in _LIMIT_OF.items() if not getattr(lists, name)]
    reason = "; ".join(found) or "no batch has such sizes (inputs <= tokens <= inputs * longest, longest <= tokens)"
    return f"cuda_graph_config: no graph is captured, every batch runs eagerly ({reason})"
