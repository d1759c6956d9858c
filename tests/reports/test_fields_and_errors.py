"""The name that a model is served under, and errors that every client can read."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from edges.test_http_embeddings import error
from reports.asking import ask
from stack import Stack
from standin_stack import StandInFactory

pytestmark = pytest.mark.process


def test_a_folder_is_served_under_its_name(make_standin: StandInFactory) -> None:
    """The path of a folder shown as the model's name, or any name taken: clients that route by it break."""
    named = make_standin("--served_model_name=tiny-enc").start().wait_ready()
    for body in ({"input": "t10"}, {"input": "t10", "model": "tiny-enc"}):
        assert ask(named, body).json()["model"] == "tiny-enc"
    assert [card["id"] for card in named.http.get("/v1/models").json()["data"]] == ["tiny-enc"]
    for other in ("other", str(named.model), "t"):
        assert error(ask(named, {"input": "t10", "model": other}), 404)["code"] == "model_not_found"


ERRORS: dict[str, tuple[Callable[[Stack], httpx.Response], int]] = {
    "a wrong type": (lambda stack: ask(stack, {"input": {"text": "t10"}}), 400),
    "a missing field": (lambda stack: ask(stack, {"model": "plain"}), 400),
    "too long": (lambda stack: ask(stack, {"input": "t10 " * 63}), 400),
    "an unknown path": (lambda stack: ask(stack, {"input": "t10"}, path="/v3/embeddings"), 404),
    "a wrong method": (lambda stack: stack.http.get("/v1/embeddings"), 405),
}


@pytest.mark.parametrize("what", ERRORS)
def test_every_error_is_an_envelope(stack: Stack, what: str) -> None:
    """Errors in the shape of the web framework instead of the API's, without a message (a full queue: test_queue)."""
    request, status = ERRORS[what]
    found = error(request(stack), status)
    assert isinstance(found["message"], str)
    assert isinstance(found["type"], str)
    assert found["message"]
