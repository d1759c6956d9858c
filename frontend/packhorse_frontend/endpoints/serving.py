"""What a request is measured by: the server as it is at one moment."""

from __future__ import annotations

from dataclasses import dataclass

from packhorse_frontend.bodies.inputs import LengthRule
from packhorse_frontend.gate import find_refusal, input_limit
from packhorse_frontend.problems import Problem
from packhorse_frontend.state import FrontendState
from packhorse_frontend.tokens.texts import TextTokenizer
from packhorse_shared.messages import BrokerState, ModelFacts


@dataclass(frozen=True)
class Serving:
    """The model, and what is asked of its inputs."""

    broker: BrokerState
    model: ModelFacts
    tokenizer: TextTokenizer
    names: tuple[str, ...]
    """Every name the API answers to; the first is echoed."""
    max_inputs: int

    @property
    def name(self) -> str:
        """What answers call the model."""
        return self.names[0]

    def check_name(self, asked: str | None) -> None:
        """Raises Problem (404) for a model that is not served."""
        if asked is not None and asked not in self.names:
            names = " or ".join(self.names)
            raise Problem(
                404, f"the model {asked[:256]!r} is not served here; use {names}", param="model", code="model_not_found"
            )

    def length_rule(self, truncate_prompt_tokens: int | None) -> LengthRule:
        """How long an input may be, and where it is cut."""
        limit, setting = input_limit(self.broker, self.model)
        return LengthRule(limit, setting, limit if truncate_prompt_tokens == -1 else truncate_prompt_tokens)


def admit(state: FrontendState) -> Serving:
    """What is needed to serve a request now. Raises Problem (503, 429) before any work is done for it."""
    problem = state.outage()
    if problem is not None:
        raise problem
    broker = state.client.state
    assert broker is not None
    problem = find_refusal(broker)
    if problem is not None:
        raise problem
    return _serving(state, broker)


def admit_reading(state: FrontendState) -> Serving:
    """The same for what needs the tokenizer alone: no worker has to be ready, and a full queue is no matter. Raises Problem
    (503) while the model is not known yet."""
    broker = state.client.state
    if broker is None or broker.model is None or state.tokenizer is None:
        problem = state.outage()
        if problem is not None:
            raise problem
    assert broker is not None
    return _serving(state, broker)


def _serving(state: FrontendState, broker: BrokerState) -> Serving:
    assert broker.model is not None
    assert state.tokenizer is not None
    return Serving(broker, broker.model, state.tokenizer, state.served_names, state.http.max_inputs)
