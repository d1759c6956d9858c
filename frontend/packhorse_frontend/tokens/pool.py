"""Threads that tokenize, so that the event loop keeps turning.

Requests that arrive in one turn of the event loop share a thread's errand; a large one is cut into slices for all threads.
The tokenizer lets go of the interpreter while it works.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np

from packhorse_frontend.bodies.inputs import TokenizedInputs
from packhorse_frontend.tokens.texts import TextTokenizer, TextWork

_CHARS_PER_ERRAND = 16_384
_CHARS_PER_SLICE = 65_536
_TEXTS_PER_SLICE = 256
_LARGEST_INLINE_IDS = 1 << 20
"""So many are joined on the event loop: a millisecond."""

T = TypeVar("T")
W_contra = TypeVar("W_contra", contravariant=True)


class Work(Protocol):
    """Inputs of one request (or a run of them): a dataclass, so that ``replace`` makes a run of it."""

    @property
    def texts(self) -> Sequence[Any]:
        """The inputs."""

    @property
    def first_index(self) -> int:
        """Index of the first one in its request."""

    @property
    def chars(self) -> int:
        """Size of the work."""


class Reader(Protocol[W_contra]):
    """A tokenizer for one kind of work. Used from several threads at once."""

    def tokenize(self, work: W_contra, is_abandoned: Callable[[], bool]) -> TokenizedInputs:
        """The tokens of all its inputs."""


Waiting: TypeAlias = "asyncio.Future[TokenizedInputs]"


_Errand: TypeAlias = "tuple[Reader[Any], Work, Waiting]"


@dataclass(frozen=True)
class _Outcome:
    future: Waiting
    tokens: TokenizedInputs | None
    problem: Exception | None


class TokenizerPool:
    """Tokenizes in the threads of an executor."""

    def __init__(self, executor: Executor, threads: int) -> None:
        self._executor = executor
        self._threads = threads
        self._waiting: list[_Errand] = []

    async def tokenize(self, reader: Reader[Any], work: Work) -> TokenizedInputs:
        """Tokens of the work. Raises what the reader's ``tokenize`` raises, for the input with the lowest index."""
        slices = list(_slices(work, self._threads))
        if len(slices) == 1:
            return await self._put(reader, work)
        futures = [self._put(reader, each) for each in slices]
        try:
            parts = [await future for future in futures]
            is_large = sum(len(part.ids) for part in parts) > _LARGEST_INLINE_IDS
            return await self.run(partial(_join, parts)) if is_large else _join(parts)
        finally:
            for future in futures:
                future.cancel()

    async def count_prompt_tokens(self, tokenizer: TextTokenizer, prompt: str, work: TextWork) -> int:
        """Leading tokens that are the prompt's, counted in a thread."""
        return await self.run(
            lambda: tokenizer.count_prompt_tokens(prompt, lowercase=work.lowercase, add_special_tokens=work.add_special_tokens)
        )

    async def run(self, work: Callable[[], T]) -> T:
        """The result of something else that uses a tokenizer, from a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def _put(self, reader: Reader[Any], work: Work) -> Waiting:
        loop = asyncio.get_running_loop()
        future: Waiting = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._send_errands)
        self._waiting.append((reader, work, future))
        return future

    def _send_errands(self) -> None:
        waiting, self._waiting = self._waiting, []
        errand: list[_Errand] = []
        chars = 0
        for each in waiting:
            errand.append(each)
            chars += each[1].chars
            if chars >= _CHARS_PER_ERRAND:
                self._executor.submit(self._run, errand)
                errand, chars = [], 0
        if errand:
            self._executor.submit(self._run, errand)

    def _run(self, errand: list[_Errand]) -> None:
        """In a thread: tokenize each work of the errand, then bring all outcomes to the event loop at once."""
        outcomes = []
        for reader, work, future in errand:
            try:
                outcomes.append(_Outcome(future, reader.tokenize(work, future.cancelled), None))
            except Exception as problem:  # whatever it is, its request must hear of it
                outcomes.append(_Outcome(future, None, problem))
        try:
            errand[0][2].get_loop().call_soon_threadsafe(_deliver, outcomes)
        except RuntimeError:
            return  # the event loop has ended, and with it every request


def _deliver(outcomes: list[_Outcome]) -> None:
    for outcome in outcomes:
        if outcome.future.done():
            continue
        if outcome.problem is not None:
            outcome.future.set_exception(outcome.problem)
        elif outcome.tokens is not None:
            outcome.future.set_result(outcome.tokens)


def _slices(work: Work, threads: int) -> Iterator[Work]:
    """The work in runs of texts of about equal size, at most four for each thread; small work stays whole."""
    parts = min(4 * threads, max(work.chars // _CHARS_PER_SLICE, len(work.texts) // _TEXTS_PER_SLICE), len(work.texts))
    if threads == 1 or parts <= 1:
        yield work
        return
    bounds = [len(work.texts) * part // parts for part in range(parts + 1)]
    for start, end in pairwise(bounds):
        part: Any = work  # a dataclass
        yield replace(part, texts=work.texts[start:end], first_index=work.first_index + start)


def _join(parts: list[TokenizedInputs]) -> TokenizedInputs:
    lengths: list[int] = []
    for part in parts:
        lengths.extend(part.lengths)
    ids: Any = np.concatenate([part.ids for part in parts])
    cut = tuple(chain.from_iterable(part.cut for part in parts))
    return TokenizedInputs(ids, lengths, sum(part.truncated for part in parts), cut)
