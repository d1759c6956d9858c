"""What the served model can be asked, and what is said to who asks it something else: what it is, and where to ask."""

from __future__ import annotations

from packhorse_frontend.endpoints.serving import Serving
from packhorse_frontend.problems import Problem, invalid
from packhorse_shared.messages import Task

_KINDS: dict[Task, tuple[str, str]] = {
    "embedding": (
        "a text-embedding model",
        "its vectors are at POST /v1/embeddings, and how like two texts are at POST /v1/score",
    ),
    "classify": ("a classifier", "its labels are at POST /v1/classify, and its logits at POST /v1/embeddings"),
    "reward": ("a reward model", "its rewards are at POST /v1/embeddings"),
    "token_reward": ("a token-level reward model", "its rewards are at POST /v1/embeddings"),
    "rerank": ("a reranker", "it ranks documents at POST /v1/rerank, and scores pairs at POST /v1/score"),
}
_WANTED = {
    "rerank": "ranking documents needs a reranker",
    "score": "scoring pairs needs a reranker or a text-embedding model",
    "classify": "labels need a classifier",
}


def wrong_task(serving: Serving, endpoint: str) -> Problem:
    """The 400 for an endpoint that the served model is not made for."""
    kind, place = _KINDS[serving.model.task]
    return invalid(f"{_WANTED[endpoint]}, and {serving.name} is {kind}: {place}", "model", "wrong_task")


def require_pairs(serving: Serving, endpoint: str) -> None:
    """Raises Problem (400) unless the model scores pairs of texts."""
    model = serving.model
    if model.task != "rerank":
        raise wrong_task(serving, endpoint)
    if model.pair_problem:
        raise invalid(f"{serving.name} cannot be given pairs of texts: {model.pair_problem}", "model", "wrong_task")
