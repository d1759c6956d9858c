"""POST /v1/classify, /tokenize and /detokenize over a real socket, with a fake broker behind it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from edges.fake_broker import STATE
from edges.frontend_thread import Bench, running_frontend
from edges.test_http_embeddings import error
from model_facts import model_facts
from packhorse_frontend.endpoints.classify import probabilities_of
from packhorse_frontend.schema import ClassifyAnswer, DetokenizeAnswer, TokenizeAnswer
from packhorse_shared.settings import HttpSettings
from waiting import wait_until

LABELS = ("sad", "glad", "mad")
CLASSIFIER = model_facts(task="classify", dimension=3, labels=LABELS, probabilities="softmax")


def logits(ids: Sequence[int]) -> np.ndarray:
    """The label of the first word: t10 sad, t11 glad, t12 mad."""
    found = np.zeros(3, np.float32)
    found[(ids[1] - 10) % 3] = 2
    return found


def running(**changes: Any) -> Any:
    model = msgspec.structs.replace(CLASSIFIER, **changes)
    return running_frontend(state=msgspec.structs.replace(STATE, model=model), encode=logits)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with running() as running_bench:
        yield running_bench


def classify(bench: Bench, value: Any, **fields: Any) -> dict[str, Any]:
    answer = bench.post({"input": value, **fields}, path="/v1/classify")
    assert answer.status_code == 200, answer.text
    msgspec.convert(answer.json(), ClassifyAnswer)
    return answer.json()


def test_each_input_gets_its_label_and_all_probabilities(bench: Bench) -> None:
    answer = classify(bench, ["t11", "t12 t10", "t10"])
    assert answer.keys() == {"id", "object", "created", "model", "data", "usage"}
    assert [(item["index"], item["label"], item["num_classes"]) for item in answer["data"]] == [
        (0, "glad", 3),
        (1, "mad", 3),
        (2, "sad", 3),
    ]
    high = np.exp(2) / (np.exp(2) + 2)
    assert answer["data"][0]["probs"] == pytest.approx([(1 - high) / 2, high, (1 - high) / 2])
    assert answer["usage"] == {"prompt_tokens": 10, "total_tokens": 10}


def test_ids_are_classified_too(bench: Bench) -> None:
    assert [item["label"] for item in classify(bench, [[2, 11, 3], [2, 12, 3]])["data"]] == ["glad", "mad"]
    assert classify(bench, [2, 11, 3])["data"][0]["label"] == "glad"


def test_what_is_too_long_is_refused_or_cut(bench: Bench) -> None:
    assert error(bench.post({"input": ["t10", "t11 " * 63]}, path="/v1/classify"), 400)["message"].startswith("input[1] has 65")
    answer = classify(bench, ["t10", "t11 " * 63], truncate_prompt_tokens=-1)
    assert answer["usage"]["truncated_inputs"] == 1
    assert answer["data"][1]["label"] == "glad"


@pytest.mark.parametrize("value", [None, [], 5, ["t10", 5], [[]], {"text": "t10"}])
def test_wrong_inputs_are_named(bench: Bench, value: Any) -> None:
    assert error(bench.post({"input": value}, path="/v1/classify"), 400)["param"] == "input"


def test_several_labels_may_hold_at_once() -> None:
    with running(probabilities="sigmoid") as bench:
        assert classify(bench, "t11")["data"][0]["probs"] == pytest.approx([0.5, 1 / (1 + np.exp(-2)), 0.5])
    with running(probabilities="none") as bench:
        assert classify(bench, "t11")["data"][0]["probs"] == [0, 2, 0]


def test_labels_that_are_too_many_to_be_told_have_their_numbers() -> None:
    with running(labels=()) as bench:
        assert classify(bench, "t11")["data"][0]["label"] == "LABEL_1"


def test_a_large_answer_is_whole(bench: Bench) -> None:
    answer = classify(bench, [f"t{10 + index % 3}" for index in range(2048)])
    assert [item["label"] for item in answer["data"]] == [LABELS[index % 3] for index in range(2048)]


def test_probabilities_of_extreme_logits() -> None:
    rows = np.array([[1e30, -1e30], [-1e30, 1e30], [0, 0]], dtype=np.float32)
    with np.errstate(over="raise", invalid="raise"):
        assert probabilities_of(rows, "softmax").tolist() == [[1, 0], [0, 1], [0.5, 0.5]]
        assert probabilities_of(rows, "sigmoid").tolist() == [[1, 0], [0, 1], [0.5, 0.5]]
    assert probabilities_of(rows, "none") is rows


# ---- tokens ----


def test_texts_become_tokens_and_tokens_texts(bench: Bench) -> None:
    answer = bench.post({"input": ["t10 t11", "", "t12"]}, path="/tokenize")
    assert answer.status_code == 200
    body = answer.json()
    msgspec.convert(body, TokenizeAnswer)
    assert body == {
        "model": "tiny",
        "max_seq_len": 64,
        "data": [
            {"index": 0, "tokens": [2, 10, 11, 3], "count": 4},
            {"index": 1, "tokens": [2, 3], "count": 2},
            {"index": 2, "tokens": [2, 12, 3], "count": 3},
        ],
    }
    back = bench.post({"tokens": [item["tokens"] for item in body["data"]], "skip_special_tokens": True}, path="/detokenize")
    msgspec.convert(back.json(), DetokenizeAnswer)
    assert back.json() == {
        "data": [{"index": 0, "text": "t10 t11"}, {"index": 1, "text": ""}, {"index": 2, "text": "t12"}],
    }


def test_special_tokens_are_left_out_when_asked(bench: Bench) -> None:
    body = bench.post({"input": "t10", "add_special_tokens": False}, path="/tokenize").json()
    assert body["data"] == [{"index": 0, "tokens": [10], "count": 1}]
    body = bench.post({"input": "", "add_special_tokens": False}, path="/tokenize").json()
    assert body["data"] == [{"index": 0, "tokens": [], "count": 0}]
    assert bench.post({"tokens": [2, 10, 3]}, path="/detokenize").json() == {"data": [{"index": 0, "text": "[CLS] t10 [SEP]"}]}


def test_a_text_longer_than_the_model_takes_is_counted(bench: Bench) -> None:
    [item] = bench.post({"input": "t10 " * 50_000}, path="/tokenize").json()["data"]
    assert item["count"] == len(item["tokens"]) == 50_002


def test_a_text_beyond_all_measure_is_refused(bench: Bench) -> None:
    problem = error(bench.post({"input": ["t10", "x" * 1_000_001]}, path="/tokenize"), 400)
    assert (problem["param"], problem["code"]) == ("input", "input_too_long")
    assert "1000001" in problem["message"]
    assert "1000000" in problem["message"]


@pytest.mark.parametrize("value", [None, [], 5, [5], [[5]], ["t10", None]])
def test_wrong_texts_are_named(bench: Bench, value: Any) -> None:
    assert error(bench.post({"input": value}, path="/tokenize"), 400)["param"] == "input"


@pytest.mark.parametrize("value", [None, [], 5, "t10", ["t10"], [[]], [128], [[1], [-1]], [[1], 5], [1.5], [True]])
def test_wrong_tokens_are_named(bench: Bench, value: Any) -> None:
    assert error(bench.post({"tokens": value}, path="/detokenize"), 400)["param"] == "tokens"


def test_another_model_is_404(bench: Bench) -> None:
    for path, field in (("/tokenize", "input"), ("/detokenize", "tokens"), ("/v1/classify", "input")):
        assert error(bench.post({"model": "x", field: [5] if field == "tokens" else "t10"}, path=path), 404)["param"] == "model"


def test_many_ids_are_detokenized_in_steps(bench: Bench) -> None:
    lists = [[10 + index % 100] * 200 for index in range(1000)]
    data = bench.post({"tokens": lists}, path="/detokenize").json()["data"]
    assert [item["text"] for item in data] == [" ".join([f"t{10 + index % 100}"] * 200) for index in range(1000)]


def test_a_list_of_ids_beyond_all_measure_is_refused(bench: Bench) -> None:
    problem = error(bench.post({"tokens": [[10], [11] * 1_000_001]}, path="/detokenize"), 400)
    assert (problem["param"], problem["code"]) == ("tokens", "input_too_long")
    assert problem["message"] == "tokens[1] has 1000001 ids, the limit is 1000000"


def test_much_text_is_tokenized_in_turns(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that others come in between, and an answer that would be too large is known before all the work is done."""
    asked: list[int] = []
    pool = bench.frontend.state.pool
    tokenize = pool.tokenize

    def noting(reader: Any, work: Any) -> Any:
        asked.append(work.chars)
        return tokenize(reader, work)

    monkeypatch.setattr(pool, "tokenize", noting)
    texts = [f"t{10 + index} " * 100_000 for index in range(7)]
    data = bench.post({"input": texts}, path="/tokenize").json()["data"]
    assert [item["count"] for item in data] == [100_002] * 7
    assert [set(item["tokens"]) for item in data] == [{2, 10 + index, 3} for index in range(7)]
    assert max(asked) <= 1_000_000
    assert sum(asked) == sum(map(len, texts))


@pytest.mark.parametrize(
    ("path", "body"),
    [("/tokenize", {"input": "t10"}), ("/detokenize", {"tokens": [10]}), ("/v1/classify", {"input": "t10"})],
)
def test_a_request_that_waits_for_the_tokenizer_ends_in_time(path: str, body: dict[str, Any]) -> None:
    busy = threading.Event()
    with running_frontend(HttpSettings(request_timeout=0.5), state=msgspec.structs.replace(STATE, model=CLASSIFIER)) as bench:
        try:
            for _ in range(2):
                bench.frontend.state.pool._executor.submit(busy.wait, 30)
            problem = error(bench.post(body, path=path), 504)
            assert (problem["code"], "--request_timeout" in problem["message"]) == ("timeout", True)
        finally:
            busy.set()


def test_what_is_required_is_said_in_the_endpoints_own_words(bench: Bench) -> None:
    assert error(bench.post({}, path="/detokenize"), 400)["message"] == (
        "tokens is required: token ids, or a list of token id lists"
    )
    assert error(bench.post({}, path="/tokenize"), 400)["message"] == "input is required: a text, or a list of texts"


def test_tokens_need_no_worker_once_the_model_is_known() -> None:
    with running() as bench:
        bench.broker.change(ready_workers=0, queue_inputs=10_000)
        wait_until(lambda: bench.post({"input": "t10"}, path="/v1/classify").status_code == 503)
        assert bench.post({"input": "t10"}, path="/tokenize").status_code == 200
        assert bench.post({"tokens": [10]}, path="/detokenize").status_code == 200


def test_tokens_wait_for_the_model() -> None:
    with running_frontend(wait=False, state=msgspec.structs.replace(STATE, model=None, ready_workers=0)) as bench:
        for path in ("/tokenize", "/detokenize"):
            answer = bench.post({"input": "t10", "tokens": [10]}, path=path)
            assert error(answer, 503)["code"] in ("loading", "no_worker")
            assert answer.headers["retry-after"]


def test_the_body_limit_holds_here_too() -> None:
    with running_frontend(HttpSettings(max_body_bytes=1000)) as bench:
        for path, field in (("/tokenize", "input"), ("/detokenize", "tokens")):
            assert error(bench.post({field: "x" * 1000}, path=path), 413)["code"] == "body_too_large"
