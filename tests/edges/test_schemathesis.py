"""Requests that schemathesis makes of /openapi.json, right ones and wrong ones: the answers are what the description says.

Models of three tasks are asked, since each refuses what it is not made for. Requests are the same in every run. More of them:

    SCHEMATHESIS_EXAMPLES=1000 pytest tests/edges/test_schemathesis.py -n 2
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

import msgspec
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi import checks

from edges.fake_broker import STATE, encode_ids
from edges.frontend_thread import running_frontend
from model_facts import model_facts
from packhorse_frontend.api.operations import OPERATIONS
from packhorse_frontend.layers.keys import Keys
from packhorse_shared.messages import PairSlot, PairText
from packhorse_shared.settings import HttpSettings
from waiting import wait_until

KEY = "a-key"
HEADERS = {"authorization": f"Bearer {KEY}"}
EXAMPLES = int(os.environ.get("SCHEMATHESIS_EXAMPLES", "10"))
PAIR = PairText(
    plain=(PairSlot.QUERY, " t10 ", PairSlot.DOCUMENT),
    prompted=(PairSlot.PROMPT, " ", PairSlot.QUERY, " t10 ", PairSlot.DOCUMENT),
)
MODELS = {
    "embedding": model_facts(dimension=32, matryoshka_dimensions=(8, 16), prompts={"query": "t11 "}),
    "rerank": model_facts(task="rerank", dimension=1, activation="Sigmoid", pair_text=PAIR),
    "classify": model_facts(task="classify", dimension=3, labels=("low", "middle", "high"), probabilities="softmax"),
}
FITTING = {"rerank": {"rerank"}, "rerankV2": {"rerank"}, "score": {"rerank", "embedding"}, "classify": {"classify"}}
"""The tasks of the models that an operation is for, where it is not for all."""
RIGHT = [(each.name, task) for each in OPERATIONS for task in (MODELS if each.request else ("embedding",))]
WRONG = [(each.name, task) for each in OPERATIONS if each.request for task in MODELS]
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]

Description = schemathesis.schemas.BaseSchema


@pytest.fixture(scope="module")
def descriptions() -> Iterator[dict[str, Description]]:
    """What the server of each model says of itself."""
    with ExitStack() as stack:
        found = {}
        for task, model in MODELS.items():
            bench = stack.enter_context(
                running_frontend(
                    HttpSettings(api_key=(KEY,)),
                    keys=Keys([KEY]),
                    state=msgspec.structs.replace(STATE, model=model),
                    encode=functools.partial(encode_ids, dimension=model.dimension),
                )
            )
            found[task] = schemathesis.openapi.from_dict(bench.get("/openapi.json", headers=HEADERS).json())
            found[task].config.update(base_url=bench.url)
        yield found


@pytest.mark.parametrize(("name", "task"), RIGHT)
def test_right_requests(descriptions: dict[str, Description], name: str, task: str) -> None:
    """Some are refused all the same, for what no schema says: an input that is too long, a prompt for token ids."""
    statuses = ask_all(descriptions[task], name, GenerationMode.POSITIVE)
    assert (200 in statuses) == (task in FITTING.get(name, MODELS)), statuses


@pytest.mark.parametrize(("name", "task"), WRONG)
def test_wrong_requests(descriptions: dict[str, Description], name: str, task: str) -> None:
    statuses = ask_all(descriptions[task], name, GenerationMode.NEGATIVE)
    assert 400 in statuses, statuses


def ask_all(description: Description, name: str, mode: GenerationMode) -> Counter[int]:
    """The statuses of the answers to what schemathesis makes of an operation."""
    operation = description.find_operation_by_id(name)
    statuses: Counter[int] = Counter()

    @seed(5)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        answer = wait_until(lambda: ask(case), 30, "an answer")
        case.validate_response(answer, checks=CHECKS, headers=HEADERS)
        statuses[answer.status_code] += 1

    def ask(case: schemathesis.Case) -> schemathesis.Response | None:
        """None while the fake broker counts as gone: schemathesis, at work in the same process, left it no time."""
        answer = case.call(session=session, headers=HEADERS)
        return None if answer.status_code == 503 and name != "health" and b'"no_worker"' in answer.content else answer

    with requests.Session() as session:
        check()
    return statuses
