"""POST /tokenize and /detokenize: what the model's tokenizer makes of a text, and of ids. No worker takes part."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
from starlette.types import Receive, Scope, Send

from packhorse_frontend.bodies.body import BodyShare, read_body
from packhorse_frontend.bodies.inputs import IdLists, Ids, LengthRule
from packhorse_frontend.bodies.naming import Naming
from packhorse_frontend.endpoints.answers import runs, write_list
from packhorse_frontend.endpoints.asking import Asked, Body
from packhorse_frontend.endpoints.deadline import in_time
from packhorse_frontend.endpoints.reading import BodyReader
from packhorse_frontend.endpoints.serving import admit_reading
from packhorse_frontend.layers.disconnect import while_connected
from packhorse_frontend.problems import invalid
from packhorse_frontend.reply import send_pieces, send_whole
from packhorse_frontend.schema import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest
from packhorse_frontend.state import FrontendState
from packhorse_frontend.tokens.texts import TextTokenizer, TextWork

_LONGEST_TEXT_CHARS = 1_000_000
"""Of one text: about a second's work, in which nobody can look whether the client is still there."""
_MOST_IDS = 1_000_000
"""Of one list to detokenize, for the same reason."""
_CHARS_PER_RUN = 1_000_000
"""Text that is handed to the tokenizer's threads at a time: between two runs others have their turn."""
_MOST_TOKENS = 1 << 30
"""No text is too long to be tokenized."""
_IDS_PER_STEP = 65_536
_CHARS_PER_VALUE = 4
"""Characters of an answer that take as much memory as a value."""

Answering = Callable[[FrontendState, Asked, BodyShare], Coroutine[Any, Any, Body]]


@dataclass(frozen=True)
class TokenRoute:
    """The ASGI endpoint."""

    state: FrontendState
    reader: BodyReader
    answer: Answering

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises Problem, or ClientGoneError."""
        http = self.state.http
        deadline = asyncio.get_running_loop().time() + http.request_timeout
        admit_reading(self.state)
        with self.state.body_memory.share(next(iter(self.reader.fields))) as share:
            # The body is not kept here: it may be gone before the answer is there.
            work = self._answer(await read_body(scope, receive, http.max_body_bytes, share), share)
            async with in_time(deadline, http):
                answer = await while_connected(receive, work)
            if isinstance(answer, bytes):
                await send_whole(send, answer)
            else:
                await send_pieces(scope, receive, send, answer, writer=self.state.renderer)

    async def _answer(self, body: bytes, share: BodyShare) -> Body:
        asked = await self.reader.read(body, admit_reading(self.state), lambda asked: asked)
        del body
        return await self.answer(self.state, asked, share)


async def _tokenize(state: FrontendState, asked: Asked, share: BodyShare) -> Body:
    request: TokenizeRequest = asked.request
    serving, texts = asked.serving, asked.texts("input")
    naming = Naming.of("input", len(texts.texts), listed=texts.listed)
    for index, text in enumerate(texts.texts):
        if len(text) > _LONGEST_TEXT_CHARS:
            raise invalid(
                f"{naming.label(index)} has {len(text)} characters, the limit is {_LONGEST_TEXT_CHARS}",
                "input",
                "input_too_long",
            )
    special = request.add_special_tokens is not False
    rule = LengthRule(_MOST_TOKENS, "max_seq_len", None)
    arrays: list[Ids] = []
    lengths: list[int] = []
    for start, end in runs(list(map(len, texts.texts)), _CHARS_PER_RUN):
        run = texts.texts[start:end]
        work = TextWork(run, start, naming, "", serving.model.lowercase, special, rule, may_be_empty=True)
        tokens = await state.pool.tokenize(serving.tokenizer, work)
        arrays.append(tokens.ids)
        lengths += tokens.lengths
        share.expect_answer(sum(map(len, arrays)))
    ids = arrays[0] if len(arrays) == 1 else await state.pool.run(lambda: np.concatenate(arrays))
    arrays.clear()
    ends = list(accumulate(lengths))

    def items(start: int, end: int) -> list[dict[str, Any]]:
        return [
            {"index": index, "tokens": ids[ends[index] - lengths[index] : ends[index]], "count": lengths[index]}
            for index in range(start, end)
        ]

    answer = TokenizeAnswer(model=serving.name, max_seq_len=serving.length_rule(None).limit, data=[])
    return write_list(answer, "data", lengths, items)


async def _detokenize(state: FrontendState, asked: Asked, share: BodyShare) -> Body:
    request: DetokenizeRequest = asked.request
    found = asked.inputs("tokens")
    assert isinstance(found, IdLists)
    naming = Naming.of("tokens", len(found.lengths), listed=found.listed)
    for index, length in enumerate(found.lengths):
        if length > _MOST_IDS:
            raise invalid(f"{naming.label(index)} has {length} ids, the limit is {_MOST_IDS}", "tokens", "input_too_long")
    share.expect_answer(len(found.ids))
    skips = request.skip_special_tokens is True
    lists = np.split(found.ids, np.cumsum(found.lengths)[:-1])
    texts: list[str] = []
    chars = 0
    for start, end in runs(found.lengths, _IDS_PER_STEP):
        step = await state.pool.run(partial(_detokenize_step, asked.serving.tokenizer, lists[start:end], skips))
        texts += step
        chars += sum(map(len, step))
        share.expect_answer(max(len(found.ids), chars // _CHARS_PER_VALUE))

    def items(start: int, end: int) -> list[dict[str, Any]]:
        return [{"index": index, "text": texts[index]} for index in range(start, end)]

    return write_list(DetokenizeAnswer(data=[]), "data", list(map(len, texts)), items)


def _detokenize_step(tokenizer: TextTokenizer, lists: Sequence[Ids], skips: bool) -> list[str]:
    return tokenizer.detokenize([each.tolist() for each in lists], skip_special_tokens=skips)


def tokenize_route(state: FrontendState) -> TokenRoute:
    """POST /tokenize."""
    return TokenRoute(state, BodyReader(state, TokenizeRequest, {"input": "texts"}), _tokenize)


def detokenize_route(state: FrontendState) -> TokenRoute:
    """POST /detokenize."""
    return TokenRoute(state, BodyReader(state, DetokenizeRequest, {"tokens": "ids"}), _detokenize)
