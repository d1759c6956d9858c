"""From a body to an answer: what all endpoints share that encode."""

from __future__ import annotations

import asyncio
import time

import numpy as np
from starlette.types import Receive, Scope, Send

from packhorse_frontend.bodies.body import BodyShare, read_body
from packhorse_frontend.bodies.inputs import TokenizedInputs
from packhorse_frontend.client import RequestFailedError
from packhorse_frontend.endpoints.asking import Body, Endpoint, Question
from packhorse_frontend.endpoints.deadline import in_time, out_of_time, timeout_message
from packhorse_frontend.endpoints.reading import BodyReader
from packhorse_frontend.endpoints.serving import Serving, admit
from packhorse_frontend.exchange import Encoded
from packhorse_frontend.layers.disconnect import while_connected
from packhorse_frontend.layers.metering import count_tokenized, count_truncated
from packhorse_frontend.problems import Problem, from_failure
from packhorse_frontend.reply import send_pieces, send_whole
from packhorse_frontend.state import FrontendState
from packhorse_frontend.timing import Timing
from packhorse_frontend.tokens.pairs import PairWork
from packhorse_shared.messages import SEGMENT_SHIFT, EncodeOptions, ErrorCode


class EncodeRoute:
    """The ASGI endpoint."""

    def __init__(self, state: FrontendState, endpoint: Endpoint) -> None:
        self._state = state
        self._endpoint = endpoint
        self._reader = BodyReader(state, endpoint.body, endpoint.fields)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises Problem, or ClientGoneError."""
        http = self._state.http
        deadline = asyncio.get_running_loop().time() + http.request_timeout
        admit(self._state)  # there is no use in reading the body of what will be refused
        timing = scope["state"]["timing"] = Timing()
        with self._state.body_memory.share(next(iter(self._endpoint.fields))) as share:
            # The body is not kept here: it is gone before the answer is there.
            work = self._answer(await read_body(scope, receive, http.max_body_bytes, share), deadline, share, timing)
            answer = await while_connected(receive, work)
            if isinstance(answer, bytes):
                await send_whole(send, answer, timing.headers())
            else:
                await send_pieces(scope, receive, send, answer, writer=self._state.renderer, headers=timing.headers())

    async def _answer(self, body: bytes, deadline: float, share: BodyShare, timing: Timing) -> Body:
        serving = admit(self._state)
        async with in_time(deadline, self._state.http):
            question = await self._reader.read(body, serving, self._endpoint.read)
            del body
            tokens, options = await self._tokenize(question, serving, timing)
        if tokens.truncated:
            count_truncated(self._state.meter, tokens.truncated)
        admit(self._state)  # the queue may have filled meanwhile
        share.expect_answer(question.shape.values_of_all(tokens.lengths))
        encoded = await self._encode(tokens, options, question, deadline, timing)
        return question.write(encoded.rows, tokens)

    async def _tokenize(self, question: Question, serving: Serving, timing: Timing) -> tuple[TokenizedInputs, EncodeOptions]:
        work = question.work
        if isinstance(work, TokenizedInputs):
            return work, EncodeOptions(scored=question.scored)
        timing.tokenize_began = time.monotonic()
        pool, prompt_tokens = self._state.pool, 0
        if isinstance(work, PairWork):
            tokens = await pool.tokenize(self._state.pairs_of(serving.model), work)
        else:
            tokens = await pool.tokenize(serving.tokenizer, work)
            if work.prompt:
                prompt_tokens = await pool.count_prompt_tokens(serving.tokenizer, work.prompt, work)
        timing.tokenize_s = time.monotonic() - timing.tokenize_began
        count_tokenized(self._state.meter, timing.tokenize_s)
        _check_ids(tokens, serving)
        return tokens, EncodeOptions(prompt_tokens, question.scored)

    async def _encode(
        self, tokens: TokenizedInputs, options: EncodeOptions, question: Question, deadline: float, timing: Timing
    ) -> Encoded:
        timing.inputs, timing.tokens = len(tokens.lengths), len(tokens.ids)
        timing.asked_at = time.monotonic()
        if asyncio.get_running_loop().time() >= deadline:
            raise out_of_time(self._state.http)
        try:
            encoded = await self._state.client.encode(
                tokens.ids,
                tokens.lengths,
                shape=question.shape,
                deadline=deadline,
                priority=question.priority,
                options=options,
            )
        except RequestFailedError as problem:
            failure = problem.failure
            message = timeout_message(self._state.http) if failure.code is ErrorCode.TIMEOUT else failure.message
            place = (
                None if failure.index is None else (question.naming.label(failure.index), question.naming.param(failure.index))
            )
            raise from_failure(failure.code, message, failure.retry_after_s, place) from None
        timing.answered_at = time.monotonic()
        timing.queue_ms, timing.encode_ms = encoded.queue_ms, encoded.encode_ms
        return encoded


def _check_ids(tokens: TokenizedInputs, serving: Serving) -> None:
    """Whether the model has an embedding for every id that the tokenizer made. Raises Problem (500)."""
    ids = tokens.ids if serving.model.segments == 1 else np.bitwise_and(tokens.ids, (1 << SEGMENT_SHIFT) - 1)
    if int(ids.max()) >= serving.model.vocabulary_rows:
        raise Problem(500, "the tokenizer made an id that the model has no embedding for", code="tokenizer_mismatch")
