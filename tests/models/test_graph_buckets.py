"""Which shapes are captured and which one a batch runs in, against a reference that tries everything. No torch, no GPU."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse_shared.graph_config import EncodeCudaGraphConfig, GraphConfigError
from packhorse_worker.engine.graphs.buckets import MAX_GRAPHS, Buckets
from packhorse_worker.engine.graphs.generation import batch_sizes_to, num_tokens_to, seq_lens_to
from packhorse_worker.engine.packing import Shape

SMALL = [[1], [2], [3], [1, 2], [1, 3], [2, 4], [1, 2, 3, 4]]
TOKENS = [[3], [8], [2, 5], [1, 4, 6], [4, 5, 6, 7]]
LENGTHS = [[2], [4], [1, 3], [2, 4], [1, 2, 3, 6]]
LIMITS = [(4, 8, 6), (3, 8, 6), (4, 5, 6), (4, 8, 2), (2, 4, 3), (1, 1, 1)]


def within(sizes: Sequence[int], limit: int, *, padding: bool) -> list[int]:
    """The sizes that count, as the rule says it: clamped and each once, or dropped."""
    return sorted({min(size, limit) for size in sizes}) if padding else [size for size in sizes if size <= limit]


def captured(batch_sizes: Iterable[int], num_tokens: Iterable[int], seq_lens: Iterable[int]) -> set[tuple[int, int, int]]:
    """(tokens, inputs, longest) of which some batch is exactly so."""
    combinations = itertools.product(num_tokens, batch_sizes, seq_lens)
    return {(t, b, s) for t, b, s in combinations if b <= t <= b * s and s <= t}


def batches(most: int) -> Iterator[tuple[int, int, int]]:
    """(inputs, tokens, longest) of every batch of up to so many tokens: what is left behind the longest has as many tokens."""
    for b, t, s in itertools.product(range(1, most + 1), repeat=3):
        if s + (b - 1) <= t <= b * s:
            yield b, t, s


def holds(shape: tuple[int, int, int], batch: tuple[int, int, int]) -> bool:
    """Whether a batch, filled up with inputs of one token, runs in a graph: told from the lengths, one after the other."""
    rows, inputs, longest = shape
    b, t, s = batch
    if b > inputs or s > longest:
        return False
    while b < inputs:
        b, t = b + 1, t + 1
    return t <= rows


@pytest.mark.parametrize("padding", [True, False], ids=["padded", "exact"])
def test_every_choice_over_small_configurations(padding: bool) -> None:
    tried = found = 0
    for sizes, tokens, lengths, limits in itertools.product(SMALL, TOKENS, LENGTHS, LIMITS):
        config = EncodeCudaGraphConfig(batch_sizes=sizes, num_tokens=tokens, seq_lens=lengths, enable_padding=padding)
        buckets = Buckets.of(config, *limits)
        lists = [within(each, limit, padding=padding) for each, limit in zip((sizes, tokens, lengths), limits, strict=True)]
        shapes = captured(*lists)
        assert set(buckets.shapes) == {Shape(*each) for each in shapes}
        assert list(buckets.shapes) == sorted(set(buckets.shapes), reverse=True), "each once, the largest first"
        assert bool(buckets.why_none) == (not shapes)
        for batch in batches(9):
            b, t, s = batch
            fitting = [each for each in shapes if (holds(each, batch) if padding else each == (t, b, s))]
            expected = Shape(*min(fitting)) if fitting else None
            assert buckets.find(b, t, s) == expected, (config, limits, batch)
            tried, found = tried + 1, found + (expected is not None)
    assert tried > 50_000
    assert found > tried / 500


SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=8)


@given(
    config=st.builds(
        EncodeCudaGraphConfig,
        batch_sizes=st.none() | SIZES,
        num_tokens=SIZES,
        seq_lens=SIZES,
        enable_padding=st.booleans(),
    ),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=12),
)
def test_a_batch_runs_in_the_smallest_shape_that_holds_it(config: EncodeCudaGraphConfig, lengths: list[int]) -> None:
    buckets = Buckets.of(config, 4096, 1 << 22, 1 << 22)
    batch = len(lengths), sum(lengths), max(lengths)
    exact = (batch[1], batch[0], batch[2])
    shapes = [(each.num_tokens, each.batch_size, each.seq_len) for each in buckets.shapes]
    fitting = [each for each in shapes if (holds(each, batch) if config.enable_padding else each == exact)]
    assert buckets.find(*batch) == (Shape(*min(fitting)) if fitting else None)


# ---- generation ----


@given(most=st.integers(1, 1 << 22), padding=st.booleans())
def test_generated_sizes(most: int, padding: bool) -> None:
    powers = {1 << power for power in range(23)}
    middles = {3 << power for power in range(3, 22)}
    small = {1, 2, 4, *range(8, 129, 8)} if padding else {*range(1, 33), 64, 128}
    rules = {
        batch_sizes_to(most, with_padding=padding): small | {size for size in powers if size > 128},
        num_tokens_to(most): {size for size in powers | middles if size >= 16},
        seq_lens_to(most): {size for size in powers if size >= 32},
    }
    for found, allowed in rules.items():
        assert list(found) == sorted({most} | {size for size in allowed if size <= most})


def test_generated_sizes_in_words() -> None:
    assert batch_sizes_to(20, with_padding=True) == (1, 2, 4, 8, 16, 20)
    assert batch_sizes_to(300, with_padding=False) == (*range(1, 33), 64, 128, 256, 300)
    assert num_tokens_to(100) == (16, 24, 32, 48, 64, 96, 100)
    assert num_tokens_to(10) == (10,)
    assert seq_lens_to(512) == (32, 64, 128, 256, 512)


@pytest.mark.parametrize("padding", [True, False], ids=["padded", "exact"])
def test_without_batch_sizes_they_go_to_128_within_the_limit_and_that_is_not_told(padding: bool) -> None:
    config = EncodeCudaGraphConfig(num_tokens=[64], seq_lens=[64], enable_padding=padding)
    buckets = Buckets.of(config, 20, 8192, 512)
    expected = (1, 2, 4, 8, 16, 20) if padding else tuple(range(1, 21))
    assert buckets.lists.batch_sizes == expected
    assert buckets.lists.changes == ""
    assert Buckets.of(config, 4096, 8192, 512).lists.batch_sizes[-1] == 128


def test_what_is_over_a_limit_is_told() -> None:
    config = EncodeCudaGraphConfig(batch_sizes=[1, 64], max_num_token=10_000, seq_lens=[32, 600, 700], enable_padding=True)
    buckets = Buckets.of(config, 32, 8000, 512)
    assert buckets.lists.batch_sizes == (1, 32)
    assert buckets.lists.num_tokens[-2:] == (6144, 8000)
    assert buckets.lists.seq_lens == (32, 512)
    assert buckets.lists.changes == (
        "batch_sizes: 64 over max_batch_size (32), clamped; num_tokens: 2 sizes from 8192 to 10000 over max_num_tokens (8000), "
        "clamped; seq_lens: 2 sizes from 600 to 700 over max_seq_len (512), clamped"
    )
    exact = EncodeCudaGraphConfig(batch_sizes=[1, 64], num_tokens=[32], seq_lens=[32])
    assert Buckets.of(exact, 32, 8000, 512).lists.changes == "batch_sizes: 64 over max_batch_size (32), dropped"
    assert Buckets.of(exact, 64, 8000, 512).lists.changes == ""


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (EncodeCudaGraphConfig(seq_lens=[8]), ["lacks num_tokens (or max_num_token):", "no graph", "eagerly"]),
        (EncodeCudaGraphConfig(max_num_token=8), ["lacks seq_lens (or max_seq_len):"]),
        (EncodeCudaGraphConfig(batch_sizes=[2]), ["lacks num_tokens (or max_num_token) and seq_lens (or max_seq_len):"]),
        (EncodeCudaGraphConfig(batch_sizes=[64], num_tokens=[8], seq_lens=[8]), ["batch_sizes: none within max_batch_size"]),
        (EncodeCudaGraphConfig(batch_sizes=[4], num_tokens=[3], seq_lens=[3]), ["no batch has such sizes"]),
    ],
    ids=str,
)
def test_where_nothing_is_captured_it_says_why(config: EncodeCudaGraphConfig, words: list[str]) -> None:
    buckets = Buckets.of(config, 32, 8192, 512)
    assert buckets.shapes == ()
    assert buckets.find(1, 8, 8) is None
    for word in words:
        assert word in buckets.why_none


def test_more_graphs_than_anybody_wants_are_refused() -> None:
    sizes = range(1, 257)
    config = EncodeCudaGraphConfig(batch_sizes=sizes, num_tokens=sizes, seq_lens=sizes)
    with pytest.raises(
        GraphConfigError, match=rf"^cuda_graph_config: asks for \d{{6,}} graphs, limit {MAX_GRAPHS}: .*shorter lists"
    ):
        Buckets.of(config, 4096, 1 << 22, 1 << 22)


@given(sizes=SIZES, tokens=SIZES, lengths=SIZES)
def test_graphs_are_counted_as_they_are_made(sizes: list[int], tokens: list[int], lengths: list[int]) -> None:
    lists = Buckets.of(EncodeCudaGraphConfig(batch_sizes=sizes, num_tokens=tokens, seq_lens=lengths), 99, 99, 99).lists
    assert lists.count() == len(lists.shapes()) == len(captured(set(sizes), set(tokens), set(lengths)))


def test_it_needs_no_torch() -> None:
    code = "import sys, packhorse_worker.engine.graphs.buckets; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
