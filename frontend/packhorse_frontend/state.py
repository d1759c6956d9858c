"""What the routes of one frontend share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

from packhorse_frontend.bodies.body import BodyMemory
from packhorse_frontend.client import BrokerClient
from packhorse_frontend.gate import find_outage, input_limit
from packhorse_frontend.problems import Problem, unavailable
from packhorse_frontend.tokens.pairs import PairTokenizer
from packhorse_frontend.tokens.pool import TokenizerPool
from packhorse_frontend.tokens.texts import TextTokenizer
from packhorse_shared.messages import ErrorCode, ModelFacts
from packhorse_shared.meter import Meter
from packhorse_shared.settings import HttpSettings

_BROKER_TIMEOUT_S = 2.0

T = TypeVar("T")


@dataclass
class FrontendState:
    """Opened by ``app.py`` when the event loop starts, read by the routes."""

    http: HttpSettings
    served_names: tuple[str, ...]
    """Every name the API answers to; the first is echoed."""
    created: int
    """Unix time that /v1/models gives for the model."""
    client: BrokerClient
    meter: Meter
    """What this process counts; the client takes it to the broker."""
    pool: TokenizerPool
    renderer: Executor
    """One thread, for large answers."""
    body_reader: Executor
    """One thread, for large bodies: one after the other."""
    body_memory: BodyMemory
    tokenizer: TextTokenizer | None = None
    """None while it loads."""
    is_draining: bool = False
    _pairs: tuple[str, PairTokenizer] | None = None

    def outage(self) -> Problem | None:
        """Why nothing can be served now, or None."""
        return find_outage(
            self.client.state, is_connected=self.client.is_connected(), is_tokenizer_loaded=self.tokenizer is not None
        )

    async def ask_broker(self, question: Callable[[float], Awaitable[T]]) -> T:
        """What the broker tells of itself: ``client.status`` or ``client.metrics``. Raises Problem (503) when it does not."""
        if not self.client.is_connected():
            raise unavailable(ErrorCode.NO_WORKER, "the broker does not answer", 1)
        try:
            return await question(_BROKER_TIMEOUT_S)
        except TimeoutError:
            message = f"the broker did not answer within {_BROKER_TIMEOUT_S:g} s"
            raise unavailable(ErrorCode.NO_WORKER, message, 1) from None

    def model(self) -> ModelFacts | None:
        """What is known of the model, None before a worker was ready."""
        return self.client.state.model if self.client.state is not None else None

    def pairs_of(self, model: ModelFacts) -> PairTokenizer:
        """What makes tokens of this model's pairs of texts, made once."""
        assert self.tokenizer is not None
        if self._pairs is None or self._pairs[0] != model.fingerprint:
            self._pairs = (model.fingerprint, PairTokenizer(self.tokenizer.model_tokenizer, model))
        return self._pairs[1]

    def longest_input(self) -> int | None:
        """Tokens that one input may have, None before a worker was ready."""
        state, model = self.client.state, self.model()
        return input_limit(state, model)[0] if state is not None and model is not None else None
