"""Every route: those that encode, and here those beside them: health, status, models."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from packhorse_frontend.api.pages import make_page_routes
from packhorse_frontend.endpoints.classify import CLASSIFY
from packhorse_frontend.endpoints.embeddings import EMBEDDINGS
from packhorse_frontend.endpoints.encode_route import EncodeRoute
from packhorse_frontend.endpoints.rerank import RERANK_V1, RERANK_V2
from packhorse_frontend.endpoints.score import SCORE
from packhorse_frontend.endpoints.token_routes import detokenize_route, tokenize_route
from packhorse_frontend.metrics_page import metrics
from packhorse_frontend.problems import Problem, unavailable
from packhorse_frontend.schema import Healthy, ModelCard, ModelList
from packhorse_frontend.state import FrontendState
from packhorse_shared import __version__
from packhorse_shared.messages import ErrorCode

_ENCODING = {
    "/v1/embeddings": EMBEDDINGS,
    "/embeddings": EMBEDDINGS,
    "/v1/rerank": RERANK_V1,
    "/rerank": RERANK_V1,
    "/v2/rerank": RERANK_V2,
    "/v1/score": SCORE,
    "/v1/classify": CLASSIFY,
}


def make_routes(state: FrontendState) -> list[Route]:
    """Every route of the API."""
    return [
        *(Route(path, EncodeRoute(state, endpoint), methods=["POST"]) for path, endpoint in _ENCODING.items()),
        Route("/tokenize", tokenize_route(state), methods=["POST"]),
        Route("/detokenize", detokenize_route(state), methods=["POST"]),
        Route("/health", _bind(_health, state)),
        Route("/live", _bind(_live, state)),
        Route("/status", _bind(_status, state)),
        Route("/metrics", _bind(metrics, state)),
        Route("/v1/models", _bind(_models, state)),
        Route("/v1/models/{name:path}", _bind(_model, state)),
        *make_page_routes(state),
    ]


def _bind(handler: Any, state: FrontendState) -> Any:
    async def endpoint(request: Request) -> Response:
        answer: Response = await handler(request, state)
        return answer

    return endpoint


def _json(body: Any) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


async def _live(_request: Request, _state: FrontendState) -> Response:
    """This process answers."""
    return _json(Healthy())


async def _health(_request: Request, state: FrontendState) -> Response:
    """A worker is ready and the broker answers; else 503 with the reason."""
    problem = state.outage()
    if state.is_draining:
        problem = unavailable(ErrorCode.DRAINING, "the server is stopping", 1)
    if problem is not None:
        problem.is_expected = True
        raise problem
    return _json(Healthy())


async def _status(_request: Request, state: FrontendState) -> Response:
    """The broker's report."""
    report = await state.ask_broker(state.client.status)
    return _json(msgspec.structs.replace(report, version=__version__))


async def _models(_request: Request, state: FrontendState) -> Response:
    """All served names."""
    return _json(ModelList(data=[_card(name, state) for name in state.served_names]))


async def _model(request: Request, state: FrontendState) -> Response:
    """One served name."""
    name = request.path_params["name"]
    if name not in state.served_names:
        names = " or ".join(state.served_names)
        raise Problem(404, f"the model {name[:256]!r} is not served here; use {names}", param="model", code="model_not_found")
    return _json(_card(name, state))


def _card(name: str, state: FrontendState) -> ModelCard:
    model = state.model()
    return ModelCard(
        id=name,
        created=state.created,
        dimension=model.dimension if model else None,
        max_seq_len=state.longest_input(),
        task=model.task if model else None,
    )
