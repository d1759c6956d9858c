"""Whether a request may come in now: decided from what is known before any work is done for it."""

from __future__ import annotations

from packhorse_frontend.problems import Problem, unavailable
from packhorse_shared.messages import BrokerState, ErrorCode, ModelFacts

_LOADING_RETRY_S = 2
_BROKER_RETRY_S = 1


def _reject(code: ErrorCode, message: str, retry_after_s: int) -> Problem:
    return unavailable(code, message, retry_after_s, is_rejection=True)


def find_outage(state: BrokerState | None, *, is_connected: bool, is_tokenizer_loaded: bool) -> Problem | None:
    """Why nothing can be served at this moment (503), or None. What /health answers; a full queue is no outage."""
    if state is None:
        return _reject(ErrorCode.LOADING, "the server is starting: its broker has not answered yet", _LOADING_RETRY_S)
    if not is_connected:
        return _reject(ErrorCode.NO_WORKER, "the broker does not answer; it is being restarted", _BROKER_RETRY_S)
    if state.draining:
        return _reject(ErrorCode.DRAINING, "the server is stopping", state.retry_after_s)
    if state.ready_workers == 0 or state.model is None:
        return _without_worker(state)
    if not is_tokenizer_loaded:
        return _reject(ErrorCode.LOADING, "the tokenizer is loading", _LOADING_RETRY_S)
    return None


def _without_worker(state: BrokerState) -> Problem:
    if state.loading_workers > 0:
        return _reject(ErrorCode.LOADING, "the model is loading", max(_LOADING_RETRY_S, state.retry_after_s))
    return _reject(ErrorCode.NO_WORKER, "no worker is running", state.retry_after_s)


def input_limit(state: BrokerState, model: ModelFacts) -> tuple[int, str]:
    """Tokens that one input may have now, and the name of the setting that says so: the tighter of the two that can."""
    if 0 < state.max_num_tokens < model.max_seq_len:
        return state.max_num_tokens, "max_num_tokens"
    return model.max_seq_len, "max_seq_len"


def find_refusal(state: BrokerState) -> Problem | None:
    """Why a new request is refused although the server works (429), or None. Below the limit any size is admitted."""
    if state.queue_inputs < state.queue_limit:
        return None
    return _reject(
        ErrorCode.QUEUE_FULL,
        f"{state.queue_inputs} inputs wait already, the limit is {state.queue_limit} (--max_queue_size); try again later",
        state.retry_after_s,
    )
