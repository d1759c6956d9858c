"""/openapi.json: every route is in it, it is valid, and it says of each field what the parser does."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import httpx
import jsonschema
import msgspec
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from edges.fake_broker import STATE, encode_ids
from edges.frontend_thread import NAMES, Bench, running_frontend
from model_facts import model_facts
from packhorse_frontend.api.document import make_document
from packhorse_frontend.api.operations import OPERATIONS
from packhorse_frontend.api.rules import Served
from packhorse_frontend.routes import make_routes
from packhorse_shared.messages import ModelFacts, PairSlot, PairText
from packhorse_shared.settings import HttpSettings
from waiting import wait_until

EMBEDDING = model_facts(dimension=32, matryoshka_dimensions=(8,), prompts={"query": "t11 "})
RERANK = model_facts(
    task="rerank",
    dimension=1,
    pair_text=PairText(plain=(PairSlot.QUERY, " ", PairSlot.DOCUMENT), prompted=(PairSlot.PROMPT, " ", PairSlot.QUERY)),
)
CLASSIFY = model_facts(task="classify", dimension=2, labels=("low", "high"), probabilities="softmax")
FITTING = {
    "/v1/embeddings": EMBEDDING,
    "/v1/rerank": RERANK,
    "/v2/rerank": RERANK,
    "/v1/score": EMBEDDING,
    "/v1/classify": CLASSIFY,
    "/tokenize": EMBEDDING,
    "/detokenize": EMBEDDING,
}
LEAST = {
    "/v1/embeddings": {"input": "t10"},
    "/v1/rerank": {"query": "t10", "documents": ["t11"]},
    "/v2/rerank": {"query": "t10", "documents": ["t11"]},
    "/v1/score": {"text_1": "t10", "text_2": "t11"},
    "/v1/classify": {"input": "t10"},
    "/tokenize": {"input": "t10"},
    "/detokenize": {"tokens": [10]},
}
VALUES: list[Any] = [
    *(None, True, False, -101, -100, -2, -1, 0, 1, 2, 8, 32, 33, 100, 101, 2.5, 10**20),
    *("", "t10", "float", "base64", "query", "nobody", *NAMES),
    *([], [""], ["t10", "t11"], ["t10", 1], [1.5], [10, 11], [-1], [127], [128], [True], [None], [[]], [[10], []]),
    *([[10], [11, 12]], [[10], "t10"], [[10, "t10"]], [[[10]]], [{}], [{"text": "t10"}, "t11"], [{"text": 1}], {}),
    *({"text": "t10"}, [10] * 5, ["t10"] * 6, [[10]] * 6, [{"text": "t10"}] * 6),
]
MAX_INPUTS = 5


def served(model: ModelFacts | None = EMBEDDING, **changes: Any) -> Served:
    fields = Served(NAMES, MAX_INPUTS, "", needs_key=False, model=model, longest_input=model and 64)
    return Served(**{**{name: getattr(fields, name) for name in fields.__dataclass_fields__}, **changes})


@pytest.fixture(scope="module")
def benches() -> Iterator[Callable[[ModelFacts], Bench]]:
    """The server of each model, started when it is first asked for."""
    running: dict[str, Bench] = {}
    with ExitStack() as stack:

        def start(model: ModelFacts) -> Bench:
            if model.task not in running:
                state = msgspec.structs.replace(STATE, model=model)
                encode = partial(encode_ids, dimension=model.dimension)
                http = HttpSettings(max_inputs=MAX_INPUTS)
                running[model.task] = stack.enter_context(running_frontend(http, state=state, encode=encode))
            return running[model.task]

        yield start


def test_every_route_is_described_and_no_other(benches: Callable[[ModelFacts], Bench]) -> None:
    routes = make_routes(benches(EMBEDDING).frontend.state)
    found = [(route.path_format, method) for route in routes for method in route.methods or () if method != "HEAD"]
    described = [(path, operation.method) for operation in OPERATIONS for path in operation.paths]
    assert sorted(found) == sorted(described)


@pytest.mark.parametrize("model", [None, EMBEDDING, RERANK, CLASSIFY, model_facts(task="token_reward")])
@pytest.mark.parametrize("needs_key", [False, True])
def test_the_description_is_valid(model: ModelFacts | None, needs_key: bool) -> None:
    document = make_document(served(model, needs_key=needs_key, root_path="/api/"))
    assert list(OpenAPIV31SpecValidator(document).iter_errors()) == []
    assert document["servers"] == [{"url": "/api"}]
    examples = 0
    for path, methods in document["paths"].items():
        if "post" in methods:
            body = methods["post"]["requestBody"]["content"]["application/json"]
            check(document, body["schema"]).validate(body["example"])
            examples += 1
            assert path == "/" or "413" in methods["post"]["responses"]
    assert examples == len(LEAST) + 2  # and the two other names


def test_keys_are_asked_for_where_there_are_some() -> None:
    assert "security" not in make_document(served())
    document = make_document(served(needs_key=True))
    assert document["security"] == [{"bearer": []}]
    are_open = {path for path, methods in document["paths"].items() if methods.get("get", {}).get("security") == []}
    assert are_open == {"/live", "/health", "/", "/docs"}
    answers = {path: next(iter(methods.values()))["responses"] for path, methods in document["paths"].items()}
    assert {path for path, found in answers.items() if "401" not in found} == are_open


def check(document: dict[str, Any], schema: dict[str, Any]) -> jsonschema.Draft202012Validator:
    """A validator of one schema of the description."""
    return jsonschema.Draft202012Validator({**schema, "components": document["components"]})


@pytest.mark.parametrize("path", LEAST)
def test_the_parser_takes_and_refuses_what_the_description_says(benches: Callable[[ModelFacts], Bench], path: str) -> None:
    """Each field by itself, with values of all kinds and around all limits."""
    bench = benches(FITTING[path])
    document = bench.get("/openapi.json").json()
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    validator = check(document, body["schema"])
    fields = document["components"]["schemas"][body["schema"]["$ref"].rsplit("/", 1)[1]]["properties"]
    validator.validate(LEAST[path])
    disagreements = []
    with httpx.Client(base_url=bench.url) as client:
        for field, value in itertools.product(fields, VALUES):
            request = {**LEAST[path], field: value}
            answer = client.post(path, json=request)
            is_taken = answer.status_code == 200
            if not is_taken:
                assert answer.json()["error"]["param"] == field, (field, value, answer.text)
            if is_taken != validator.is_valid(request) and not is_beyond_schemas(path, field, value):
                disagreements.append((field, value, answer.text[:200]))
        for field in LEAST[path]:
            missing = {name: value for name, value in LEAST[path].items() if name != field}
            assert (client.post(path, json=missing).status_code == 200) == validator.is_valid(missing), (field, "left out")
    assert disagreements == []


def is_beyond_schemas(path: str, field: str, value: Any) -> bool:
    """What no schema says, and is refused all the same, in words of its own."""
    if path == "/v1/score" and field in ("text_1", "text_2"):  # as many of both
        return isinstance(value, list)
    if field == "truncate_prompt_tokens":  # room for special tokens
        return value in (1, 2)
    return field == "input_type"  # anything on a model without prompts


def test_limits_of_the_model_are_told_once_it_is_known() -> None:
    with running_frontend(wait=False, state=msgspec.structs.replace(STATE, ready_workers=0, model=None)) as bench:
        wait_until(bench.frontend.state.client.is_connected)

        def fields() -> dict[str, Any]:
            found: dict[str, Any] = bench.get("/openapi.json").json()["components"]["schemas"]["EmbeddingsRequest"][
                "properties"
            ]
            return found

        before = fields()
        assert before["dimensions"]["anyOf"][0] == {"type": "integer", "minimum": 1}
        assert before["model"]["anyOf"][0]["enum"] == list(NAMES)
        bench.broker.change(model=EMBEDDING, ready_workers=1)
        after = wait_until(lambda: fields() != before and fields())
        assert after["dimensions"]["anyOf"][0]["enum"] == [8, 32]
        assert after["prompt_name"]["anyOf"][0]["enum"] == ["query"]
        assert "64 tokens" in after["input"]["description"]
        assert after["input"]["anyOf"][2]["items"]["maximum"] == EMBEDDING.vocabulary_rows - 1


@pytest.mark.parametrize("model", [EMBEDDING, RERANK, CLASSIFY, model_facts(task="reward", dimension=1)])
def test_what_the_served_model_is_not_for_is_said_where_it_answers_so(
    benches: Callable[[ModelFacts], Bench], model: ModelFacts
) -> None:
    bench = benches(model)
    paths = bench.get("/openapi.json").json()["paths"]
    for path, body in LEAST.items():
        answer = bench.post(body, path=path)
        is_refused = answer.status_code == 400 and answer.json()["error"]["code"] == "wrong_task"
        assert ("answers 400 `wrong_task` here" in paths[path]["post"]["description"]) == is_refused, path
