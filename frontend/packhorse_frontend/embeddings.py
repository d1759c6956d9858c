"""POST /v1/embeddings: from a body to an answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
from starlette.types import Receive, Scope, Send

from packhorse_frontend.body import LARGEST_INLINE_BYTES, BodyShare, read_body
from packhorse_frontend.client import RequestFailedError
from packhorse_frontend.dimensions import RowShape, check_dimensions, shape_of
from packhorse_frontend.disconnect import while_connected
from packhorse_frontend.exchange import Answer
from packhorse_frontend.gate import find_refusal, input_limit
from packhorse_frontend.inputs import IdLists, LengthRule, Texts, TokenizedInputs, cut_ids, read_input
from packhorse_frontend.large_body import read_large_body
from packhorse_frontend.parsing import BodyParser
from packhorse_frontend.problems import Problem, from_failure
from packhorse_frontend.prompts import choose_prompt
from packhorse_frontend.render import LARGEST_INLINE_VALUES, count_values, pieces_of, render_embeddings
from packhorse_frontend.reply import send_pieces, send_whole
from packhorse_frontend.schema import EmbeddingsRequest, Usage
from packhorse_frontend.state import FrontendState
from packhorse_frontend.tokens import TextTokenizer, TextWork
from packhorse_shared.messages import BrokerState, EncodeOptions, ErrorCode, ModelFacts


@dataclass(frozen=True)
class _Serving:
    """What a request is measured by: the server as it is at one moment."""

    broker: BrokerState
    model: ModelFacts
    tokenizer: TextTokenizer


@dataclass(frozen=True)
class _Question:
    """What a request asks for, checked as far as can be before its texts are tokenized."""

    request: EmbeddingsRequest
    """Its ``input`` is not to be looked at any more."""
    dimension: int
    inputs: Texts | TokenizedInputs
    prompt: str
    rule: LengthRule


class EmbeddingsRoute:
    """The ASGI endpoint."""

    def __init__(self, state: FrontendState) -> None:
        self._state = state
        self._parser = BodyParser(EmbeddingsRequest)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises Problem, or ClientGoneError."""
        http = self._state.http
        deadline = asyncio.get_running_loop().time() + http.request_timeout
        self._admit()  # there is no use in reading the body of what will be refused
        with self._state.body_memory.share() as share:
            body = await read_body(scope, receive, http.max_body_bytes, share)
            answer = await while_connected(receive, self._answer(body, deadline, share))
            if isinstance(answer, bytes):
                await send_whole(send, answer)
            else:
                await send_pieces(scope, receive, send, answer, self._state.renderer)

    async def _answer(self, body: bytes, deadline: float, share: BodyShare) -> bytes | Iterator[bytes]:
        """A small answer, or the pieces of a large one."""
        serving = self._admit()
        if len(body) <= LARGEST_INLINE_BYTES:
            question = self._read(body, serving)
        else:
            question = await self._read_in_thread(body, serving)
        del body
        request, dimension = question.request, question.dimension
        if isinstance(question.inputs, TokenizedInputs):
            tokens, options = question.inputs, EncodeOptions()
        else:
            tokens, options = await self._tokenize(question.inputs, question, serving)
        self._admit()  # the queue may have filled meanwhile
        shape = shape_of(serving.model)
        share.expect_answer(shape.values_of_all(tokens.lengths))
        rows = await self._encode(tokens, options, request, shape, deadline)
        usage = Usage(
            prompt_tokens=len(tokens.ids),
            total_tokens=len(tokens.ids),
            truncated_inputs=tokens.truncated if request.truncate_prompt_tokens is not None else msgspec.UNSET,
        )
        arguments = (rows, dimension, request.encoding_format or "float", self._state.served_names[0], usage)
        return render_embeddings(*arguments) if count_values(rows) <= LARGEST_INLINE_VALUES else pieces_of(*arguments)

    async def _read_in_thread(self, body: bytes, serving: _Serving) -> _Question:
        is_abandoned = threading.Event()
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._state.body_reader, lambda: self._read(body, serving, is_abandoned.is_set)
            )
        finally:
            is_abandoned.set()

    def _read(self, body: bytes, serving: _Serving, is_abandoned: Callable[[], bool] | None = None) -> _Question:
        """What a body asks for, checked. ``is_abandoned`` is given in a thread, where the body is read in steps."""
        max_inputs, rows = self._state.http.max_inputs, serving.model.vocabulary_rows
        request: EmbeddingsRequest
        inputs: Texts | IdLists | None = None
        if is_abandoned is None:
            request = self._parser.parse(body)
        else:
            request, inputs = read_large_body(body, self._parser, max_inputs, rows, is_abandoned)
        names = self._state.served_names
        if request.model is not None and request.model not in names:
            raise Problem(
                404,
                f"the model {request.model[:256]!r} is not served here; use {' or '.join(names)}",
                param="model",
                code="model_not_found",
            )
        dimension = check_dimensions(request.dimensions, serving.model, names[0])
        inputs = inputs or read_input(request.input, max_inputs, rows)
        prompt = choose_prompt(request, serving.model, is_text=isinstance(inputs, Texts))
        rule = _length_rule(request.truncate_prompt_tokens, serving)
        checked = cut_ids(inputs, rule) if isinstance(inputs, IdLists) else inputs
        return _Question(request, dimension, checked, prompt, rule)

    def _admit(self) -> _Serving:
        """What is needed to serve a request now. Raises Problem (503, 429) before any work is done for it."""
        state = self._state
        problem = state.outage()
        if problem is not None:
            raise problem
        broker, tokenizer = state.client.state, state.tokenizer
        assert broker is not None
        assert broker.model is not None
        assert tokenizer is not None
        problem = find_refusal(broker)
        if problem is not None:
            raise problem
        return _Serving(broker, broker.model, tokenizer)

    async def _tokenize(self, inputs: Texts, question: _Question, serving: _Serving) -> tuple[TokenizedInputs, EncodeOptions]:
        work = TextWork(
            inputs.texts,
            first_index=0,
            listed=inputs.listed,
            prompt=question.prompt,
            lowercase=serving.model.lowercase,
            add_special_tokens=question.request.add_special_tokens is not False,
            rule=question.rule,
        )
        tokens = await self._state.pool.tokenize(serving.tokenizer, work)
        if int(tokens.ids.max()) >= serving.model.vocabulary_rows:
            raise Problem(500, "the tokenizer made an id that the model has no embedding for", code="tokenizer_mismatch")
        if not question.prompt:
            return tokens, EncodeOptions()
        prompt_tokens = await self._state.pool.count_prompt_tokens(serving.tokenizer, question.prompt, work)
        return tokens, EncodeOptions(prompt_tokens)

    async def _encode(
        self, tokens: TokenizedInputs, options: EncodeOptions, request: EmbeddingsRequest, shape: RowShape, deadline: float
    ) -> Answer:
        if asyncio.get_running_loop().time() >= deadline:
            raise from_failure(ErrorCode.TIMEOUT, self._timeout_message(), 0, None)
        try:
            return await self._state.client.encode(
                tokens.ids,
                tokens.lengths,
                shape=shape,
                deadline=deadline,
                priority=request.priority or 0,
                options=options,
            )
        except RequestFailedError as problem:
            failure = problem.failure
            message = self._timeout_message() if failure.code is ErrorCode.TIMEOUT else failure.message
            raise from_failure(failure.code, message, failure.retry_after_s, failure.index) from None

    def _timeout_message(self) -> str:
        return f"the request was not done within {self._state.http.request_timeout:g} s (--request_timeout)"


def _length_rule(truncate_prompt_tokens: int | None, serving: _Serving) -> LengthRule:
    limit, setting = input_limit(serving.broker, serving.model)
    return LengthRule(limit, setting, limit if truncate_prompt_tokens == -1 else truncate_prompt_tokens)
