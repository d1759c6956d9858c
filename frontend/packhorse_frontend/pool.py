"""Threads that tokenize, so that the event loop keeps turning.

Requests that arrive in one turn of the event loop share a thread's errand; a large one is cut into slices for all threads.
The tokenizer lets go of the interpreter while it works.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from packhorse_frontend.inputs import TokenizedInputs
from packhorse_frontend.tokens import TextTokenizer, TextWork

_CHARS_PER_ERRAND = 16_384
_CHARS_PER_SLICE = 65_536
_TEXTS_PER_SLICE = 256

Waiting: TypeAlias = "asyncio.Future[TokenizedInputs]"


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
        self._waiting: list[tuple[TextTokenizer, TextWork, Waiting]] = []

    async def tokenize(self, tokenizer: TextTokenizer, work: TextWork) -> TokenizedInputs:
        """Tokens of the work. Raises what ``TextTokenizer.tokenize`` raises, for the input with the lowest index."""
        slices = list(_slices(work, self._threads))
        if len(slices) == 1:
            return await self._put(tokenizer, work)
        futures = [self._put(tokenizer, each) for each in slices]
        try:
            return _join([await future for future in futures])
        finally:
            for future in futures:
                future.cancel()

    async def count_prompt_tokens(self, tokenizer: TextTokenizer, prompt: str, work: TextWork) -> int:
        """Leading tokens that are the prompt's, counted in a thread."""
        return await asyncio.get_running_loop().run_in_executor(
            self._executor,
            lambda: tokenizer.count_prompt_tokens(prompt, lowercase=work.lowercase, add_special_tokens=work.add_special_tokens),
        )

    def _put(self, tokenizer: TextTokenizer, work: TextWork) -> Waiting:
        loop = asyncio.get_running_loop()
        future: Waiting = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._send_errands)
        self._waiting.append((tokenizer, work, future))
        return future

    def _send_errands(self) -> None:
        waiting, self._waiting = self._waiting, []
        errand: list[tuple[TextTokenizer, TextWork, Waiting]] = []
        chars = 0
        for each in waiting:
            errand.append(each)
            chars += each[1].chars
            if chars >= _CHARS_PER_ERRAND:
                self._executor.submit(self._run, errand)
                errand, chars = [], 0
        if errand:
            self._executor.submit(self._run, errand)

    def _run(self, errand: list[tuple[TextTokenizer, TextWork, Waiting]]) -> None:
        """In a thread: tokenize each work of the errand, then bring all outcomes to the event loop at once."""
        outcomes = []
        for tokenizer, work, future in errand:
            try:
                outcomes.append(_Outcome(future, tokenizer.tokenize(work, future.cancelled), None))
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


def _slices(work: TextWork, threads: int) -> Iterator[TextWork]:
    """The work in runs of texts of about equal size, at most four for each thread; small work stays whole."""
    parts = min(4 * threads, max(work.chars // _CHARS_PER_SLICE, len(work.texts) // _TEXTS_PER_SLICE), len(work.texts))
    if threads == 1 or parts <= 1:
        yield work
        return
    bounds = [len(work.texts) * part // parts for part in range(parts + 1)]
    for start, end in pairwise(bounds):
        yield replace(work, texts=work.texts[start:end], first_index=work.first_index + start)


def _join(parts: list[TokenizedInputs]) -> TokenizedInputs:
    lengths: list[int] = []
    for part in parts:
        lengths.extend(part.lengths)
    ids: Any = np.concatenate([part.ids for part in parts])
    return TokenizedInputs(ids, lengths, sum(part.truncated for part in parts))
