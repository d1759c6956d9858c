"""POST /v1/embeddings over a real socket, with a fake broker behind it."""

from __future__ import annotations

import base64
import gzip
import json
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import numpy as np
import openai
import pytest

from edges.fake_broker import DIMENSION, MODEL, STATE, encode_ids
from edges.frontend_thread import Bench, read_all, read_answer, running_frontend
from model_facts import model_facts
from packhorse_shared.messages import EncodeOptions
from packhorse_shared.settings import HttpSettings
from waiting import wait_until


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    """One frontend for the tests that only ask it."""
    with running_frontend() as running:
        yield running


def vectors(answer: httpx.Response) -> np.ndarray:
    assert answer.status_code == 200, answer.text
    return np.array([item["embedding"] for item in answer.json()["data"]], dtype=np.float32)


def error(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The error of an answer, which must be exactly the envelope."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    body = answer.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    return body["error"]


# ---- input forms ----


def test_token_id_lists_are_used_as_they_are(bench: Bench) -> None:
    answer = bench.post({"input": [[2, 10, 11, 3], [2, 20, 3]]})
    assert np.array_equal(vectors(answer), [encode_ids([2, 10, 11, 3]), encode_ids([2, 20, 3])])
    assert answer.json()["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    assert np.array_equal(vectors(bench.post({"input": "t10 t11"}))[0], encode_ids([2, 10, 11, 3]))


def test_one_list_of_ids_is_one_input(bench: Bench) -> None:
    answer = bench.post({"input": [2, 10, 3]})
    assert np.array_equal(vectors(answer), [encode_ids([2, 10, 3])])


@pytest.mark.parametrize("ids", [[2, 128, 3], [-1], [2**31], [2**32 + 10], [2**63], [2**64], [10**400]])
def test_ids_outside_the_embedding_table_never_reach_the_broker(bench: Bench, ids: list[int]) -> None:
    before = len(bench.broker.received)
    body = error(bench.post(b'{"input":[[5],' + json.dumps(ids).encode() + b"]}"), 400)
    assert body["param"] == "input"
    assert "input[1]" in body["message"]
    assert len(bench.broker.received) == before
    vectors(bench.post({"input": "t10"}))


def test_ids_are_narrowed_to_no_other_id(bench: Bench) -> None:
    assert "4294967306" in error(bench.post({"input": [[2, 2**32 + 10, 3]]}), 400)["message"]
    error(bench.post(b'{"input":[1e30]}'), 400)


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (b'{"input":[true,false,true]}', "input[0]"),
        (b'{"input":[[2,10.5,3]]}', "input[0][1]"),
        (b'{"input":[[2,10.0,3]]}', "input[0][1]"),
        (b'{"input":[[2,3],[2,true]]}', "input[1][1]"),
        (b'{"input":[10.0]}', "input[0]"),
    ],
)
def test_only_json_integers_are_ids(bench: Bench, body: bytes, where: str) -> None:
    found = error(bench.post(body), 400)
    assert found["param"] == "input"
    assert where in found["message"]


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (["t10", 42], "input[1]"),
        ([42, "t10"], "input[1]"),
        (["t10", None], "input[1]"),
        (["t10", [10]], "input[1]"),
        ([["t10"]], "input[0]"),
        ([[10], "t10"], "input[1]"),
        ({"text": "t10"}, "input"),
        ([{"text": "t10"}], "input[0]"),
        (7, "input"),
    ],
)
def test_a_mixture_is_refused_by_index(bench: Bench, value: Any, where: str) -> None:
    found = error(bench.post({"input": value}), 400)
    assert found["param"] == "input"
    assert where in found["message"]


def test_special_tokens_are_never_added_to_ids(bench: Bench) -> None:
    answers = [bench.post({"input": [[2, 10, 3]], "add_special_tokens": flag}) for flag in (True, False)]
    assert np.array_equal(vectors(answers[0]), vectors(answers[1]))
    assert [answer.json()["usage"]["prompt_tokens"] for answer in answers] == [3, 3]


def test_an_empty_text_is_an_input_while_special_tokens_remain(bench: Bench) -> None:
    answer = bench.post({"input": ["t10", "", "t11"]})
    assert np.array_equal(vectors(answer), [encode_ids([2, 10, 3]), encode_ids([2, 3]), encode_ids([2, 11, 3])])
    assert [item["index"] for item in answer.json()["data"]] == [0, 1, 2]
    found = error(bench.post({"input": ["t10", ""], "add_special_tokens": False}), 400)
    assert found["param"] == "input"
    assert "input[1]" in found["message"]


@pytest.mark.parametrize("value", [[], [[]], [[10], []]])
def test_an_empty_list_is_refused(bench: Bench, value: list[Any]) -> None:
    assert error(bench.post({"input": value}), 400)["param"] == "input"


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"tiny"}',
        b'{"model":"tiny","input":null}',
        b"{}",
        b"",
        b"  ",
        b"null",
        b"[]",
        b"{",
        b'"x"',
        b"\xff",
        b"{'input':1}",
    ],
)
def test_a_body_without_input_is_400(bench: Bench, body: bytes) -> None:
    assert error(bench.post(body), 400)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "body", [rb'{"input":["t10","x \ud83d y"]}', rb'{"input":["t10","\uDE00"]}', b'{"input":["t10","x \xed\xa0\xbd"]}']
)
def test_half_an_emoji_is_refused_by_index(bench: Bench, body: bytes) -> None:
    found = error(bench.post(body), 400)
    assert (found["param"], "input[1]" in found["message"]) == ("input", True)
    assert vectors(bench.post(rb'{"input":"\ud83d\ude00"}')).shape == (1, DIMENSION)


def test_half_an_emoji_in_a_field_that_is_ignored_is_called_what_it_is(bench: Bench) -> None:
    assert "surrogate" in error(bench.post(rb'{"input":"t10","x":{"y":"\ud83d"}}'), 400)["message"]


def test_what_is_not_json_is_told_plainly(bench: Bench) -> None:
    assert error(bench.post(b"{'input':1}"), 400)["message"].startswith(
        "the body is not valid JSON: object keys must be strings"
    )


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"x":' + b"[" * 100_000, b'{"input":' + b"[" * 100_000])
def test_deep_nesting_is_400(bench: Bench, body: bytes) -> None:
    error(bench.post(body), 400)


# ---- lengths ----


def test_one_token_too_many_is_refused_with_limit_and_count(bench: Bench) -> None:
    found = error(bench.post({"input": "t10 " * 63}), 400)
    assert found["param"] == "input"
    assert "65" in found["message"]
    assert "64" in found["message"]
    assert "max_seq_len" in found["message"]
    assert bench.post({"input": "t10 " * 62}).json()["usage"]["prompt_tokens"] == 64
    assert "input[1]" in error(bench.post({"input": ["t10", "t10 " * 63]}), 400)["message"]
    assert "input[1]" in error(bench.post({"input": [[10], [10] * 65]}), 400)["message"]


@pytest.mark.parametrize("words", [1, 62, 63, 500])
def test_a_text_and_a_list_of_it_are_treated_alike(bench: Bench, words: int) -> None:
    text = "t10 " * words
    one, listed = bench.post({"input": text}), bench.post({"input": [text]})
    assert one.status_code == listed.status_code == (200 if words <= 62 else 400)
    if words <= 62:
        assert one.json()["data"] == listed.json()["data"]


def test_the_smaller_limit_is_the_one_that_is_named() -> None:
    with running_frontend(state=msgspec.structs.replace(STATE, max_num_tokens=20)) as bench:
        found = error(bench.post({"input": "t10 " * 19}), 400)
        assert "20" in found["message"]
        assert "max_num_tokens" in found["message"]
        assert bench.get("/v1/models").json()["data"][0]["max_seq_len"] == 20


def test_many_inputs_come_back_in_order(bench: Bench) -> None:
    """The broker answers them in batches, shuffled."""
    texts = [f"t{10 + number} t{20 + number % 7}" for number in range(25)]
    expected = [encode_ids([2, 10 + number, 20 + number % 7, 3]) for number in range(25)]
    assert np.array_equal(vectors(bench.post({"input": texts})), expected)


@pytest.mark.parametrize(("count", "status"), [(2048, 200), (2049, 400), (6000, 400)])
def test_all_inputs_or_one_clean_refusal(bench: Bench, count: int, status: int) -> None:
    answer = bench.post({"input": ["t10"] * count})
    if status == 200:
        assert len(vectors(answer)) == count
    else:
        assert "2048" in error(answer, 400)["message"]
    vectors(bench.post({"input": "t10"}))


def test_ten_thousand_inputs_fit_into_a_message() -> None:
    with running_frontend(HttpSettings(max_inputs=10_000), batch_size=1000) as bench:
        assert len(vectors(bench.post({"input": [[10, 11]] * 10_000}))) == 10_000


# ---- truncation ----


def test_truncation_keeps_the_special_tokens_and_is_told(bench: Bench) -> None:
    answer = bench.post({"input": ["t10 " * 100, "t11"], "truncate_prompt_tokens": -1})
    assert np.array_equal(vectors(answer)[0], encode_ids([2, *[10] * 62, 3]))
    assert answer.json()["usage"] == {"prompt_tokens": 67, "total_tokens": 67, "truncated_inputs": 1}
    answer = bench.post({"input": "t10 t11 t12 t13", "truncate_prompt_tokens": 4})
    assert np.array_equal(vectors(answer)[0], encode_ids([2, 10, 11, 3]))
    answer = bench.post({"input": "t10", "truncate_prompt_tokens": 4})
    assert answer.json()["usage"]["truncated_inputs"] == 0
    assert "truncated_inputs" not in bench.post({"input": "t10", "truncate_prompt_tokens": None}).json()["usage"]


def test_truncation_of_ids_keeps_the_first(bench: Bench) -> None:
    answer = bench.post({"input": [[10, 11, 12, 13], [20]], "truncate_prompt_tokens": 3})
    assert np.array_equal(vectors(answer), [encode_ids([10, 11, 12]), encode_ids([20])])
    assert answer.json()["usage"]["truncated_inputs"] == 1
    answer = bench.post({"input": "t10 t11 t12", "truncate_prompt_tokens": 2, "add_special_tokens": False})
    assert np.array_equal(vectors(answer)[0], encode_ids([10, 11]))


@pytest.mark.parametrize("value", [-2, 0, 1, 1.5, "5", True])
def test_a_truncation_that_makes_no_sense_is_refused(bench: Bench, value: Any) -> None:
    assert error(bench.post({"input": "t10", "truncate_prompt_tokens": value}), 400)["param"] == "truncate_prompt_tokens"


def test_a_truncation_above_the_limit_does_not_lift_the_limit(bench: Bench) -> None:
    error(bench.post({"input": "t10 " * 80, "truncate_prompt_tokens": 70}), 400)
    assert bench.post({"input": "t10 " * 80, "truncate_prompt_tokens": 64}).json()["usage"]["prompt_tokens"] == 64


@pytest.mark.parametrize("value", [0, -2])
def test_ids_cut_to_nothing_are_refused(bench: Bench, value: int) -> None:
    for ids in ([10, 11], [[10], [11]]):
        assert error(bench.post({"input": ids, "truncate_prompt_tokens": value}), 400)["param"] == "truncate_prompt_tokens"


def test_ids_that_are_cut_off_are_checked_too(bench: Bench) -> None:
    """Each id must be one of the model's, checked before anything is queued."""
    found = error(bench.post({"input": [[10], [10, 11, 128]], "truncate_prompt_tokens": 1}), 400)
    assert "input[1][2]" in found["message"]


def test_eos_survives_truncation() -> None:
    with running_frontend(template="$A [SEP]") as bench:
        answer = bench.post({"input": "t10 " * 100, "truncate_prompt_tokens": 5})
        assert np.array_equal(vectors(answer)[0], encode_ids([10, 10, 10, 10, 3]))


# ---- answers ----


def test_float_and_base64_are_the_same_bits(bench: Bench) -> None:
    body = {"input": ["t10", "t11 t12"]}
    packed = bench.post({**body, "encoding_format": "base64"}).json()["data"]
    plain = bench.post(body).json()["data"]
    assert plain == bench.post({**body, "encoding_format": "float"}).json()["data"]
    for left, right in zip(packed, plain, strict=True):
        raw = base64.b64decode(left["embedding"], validate=True)
        assert len(raw) == 4 * DIMENSION
        assert np.array(right["embedding"], dtype=np.float32).astype("<f4").tobytes() == raw


def test_the_openai_client_gets_its_vectors(bench: Bench) -> None:
    """It asks for base64 by itself."""
    with openai.OpenAI(base_url=f"{bench.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model="tiny-alias", input=["t10", "t11"])
        assert [len(item.embedding) for item in answer.data] == [DIMENSION, DIMENSION]
        assert answer.model == "tiny"
        assert [model.id for model in client.models.list()] == ["tiny", "tiny-alias"]
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="other", input="t10")


@pytest.mark.parametrize("value", ["hex", "", 7, ["float"]])
def test_an_unknown_encoding_format_is_refused(bench: Bench, value: Any) -> None:
    assert error(bench.post({"input": "t10", "encoding_format": value}), 400)["param"] == "encoding_format"
    vectors(bench.post({"input": "t10", "encoding_format": None}))


@pytest.mark.parametrize("count", [1, 3])
def test_the_shape_of_an_answer(bench: Bench, count: int) -> None:
    body = bench.post({"input": ["t10"] * count}).json()
    assert list(body) == ["object", "data", "model", "usage"]
    assert (body["object"], body["model"]) == ("list", "tiny")
    assert body["usage"] == {"prompt_tokens": 3 * count, "total_tokens": 3 * count}
    for index, item in enumerate(body["data"]):
        assert list(item) == ["object", "index", "embedding"]
        assert (item["object"], item["index"]) == ("embedding", index)
        assert all(type(value) is float for value in item["embedding"])


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
def test_a_vector_that_is_not_finite_never_leaves(encoding_format: str) -> None:

    def encode(ids: Any) -> np.ndarray:
        return np.full(DIMENSION, np.nan, dtype=np.float32) if 99 in ids else encode_ids(ids)

    with running_frontend(encode=encode) as bench:
        answer = bench.post({"input": ["t10", "t99"], "encoding_format": encoding_format})
        found = error(answer, 500)
        assert found["code"] == "non_finite_output"
        assert "input[1]" in found["message"]
        assert "NaN" not in answer.text
        vectors(bench.post({"input": "t10"}))


# ---- fields ----


def test_dimensions_of_a_model_that_is_not_matryoshka(bench: Bench) -> None:
    found = error(bench.post({"input": "t10", "dimensions": 8}), 400)
    assert found["param"] == "dimensions"
    assert "tiny" in found["message"]
    assert "32" in found["message"]
    plain = vectors(bench.post({"input": "t10"}))
    assert np.array_equal(vectors(bench.post({"input": "t10", "dimensions": DIMENSION})), plain)
    for value in (0, -1, True, 32.0, "32", 2**70):
        assert error(bench.post({"input": "t10", "dimensions": value}), 400)["param"] == "dimensions"


def test_a_matryoshka_model_shortens_and_renormalizes() -> None:
    model = msgspec.structs.replace(MODEL, matryoshka_dimensions=(8, 16))
    with running_frontend(state=msgspec.structs.replace(STATE, model=model)) as bench:
        short = vectors(bench.post({"input": "t10", "dimensions": 8}))[0]
        expected = encode_ids([2, 10, 3])[:8]
        assert np.allclose(short, expected / np.linalg.norm(expected), atol=1e-6)
        assert "8, 16, 32" in error(bench.post({"input": "t10", "dimensions": 12}), 400)["message"]


def test_unknown_fields_and_nulls_are_ignored(bench: Bench) -> None:
    plain = vectors(bench.post({"input": "t10"}))
    extra = {
        "input_type": "query",
        "metadata": {"a": [1]},
        "stream": False,
        "drop_params": True,
        "streaming": True,
        "user": "u-7",
    }
    assert np.array_equal(vectors(bench.post({"input": "t10", **extra})), plain)
    names = ("model", "user", "encoding_format", "dimensions", "add_special_tokens", "truncate_prompt_tokens", "priority")
    nulls: dict[str, Any] = dict.fromkeys((*names, "prompt", "prompt_name", "input_type"))
    assert np.array_equal(vectors(bench.post({"input": "t10", **nulls})), plain)


@pytest.mark.parametrize(
    ("field", "value"),
    [("user", 12345), ("model", 7), ("add_special_tokens", 1), ("priority", 101), ("priority", -101), ("priority", "high"),
     ("prompt", 1), ("prompt_name", []), ("input_type", 3)],
)  # fmt: skip
def test_a_field_of_a_wrong_type_is_named(bench: Bench, field: str, value: Any) -> None:
    found = error(bench.post({"input": "t10", field: value}), 400)
    assert found["param"] == field
    assert field in found["message"]


def test_priority_reaches_the_broker(bench: Bench) -> None:
    vectors(bench.post({"input": "t10", "priority": -7}))
    assert bench.broker.received[-1].request.priority == -7
    assert bench.broker.received[-1].request.options == EncodeOptions()


def test_the_first_served_name_is_echoed_and_others_are_404(bench: Bench) -> None:
    assert bench.post({"input": "t10", "model": "tiny-alias"}).json()["model"] == "tiny"
    found = error(bench.post({"input": "t10", "model": "other"}), 404)
    assert (found["code"], found["param"]) == ("model_not_found", "model")
    error(bench.post({"input": "t10", "model": ""}), 404)
    assert [card["id"] for card in bench.get("/v1/models").json()["data"]] == ["tiny", "tiny-alias"]
    assert bench.get("/v1/models/tiny").json()["dimension"] == DIMENSION
    error(bench.get("/v1/models/other"), 404)


PROMPTS = model_facts(
    dimension=DIMENSION,
    prompts={"query": "t20 t21 ", "passage": "t30 ", "default": "t40 "},
    default_prompt_name="default",
    lowercase=True,
)


def test_prompts_go_before_the_texts() -> None:
    with running_frontend(state=msgspec.structs.replace(STATE, model=PROMPTS)) as bench:

        def sent(**fields: Any) -> tuple[list[int], int]:
            vectors(bench.post({"input": "T10", **fields}))
            received = bench.broker.received[-1]
            return received.inputs[0], received.request.options.prompt_tokens

        assert sent() == ([2, 40, 10, 3], 2)
        assert sent(prompt_name="query") == ([2, 20, 21, 10, 3], 3)
        assert sent(input_type="query") == ([2, 20, 21, 10, 3], 3)
        assert sent(input_type="document") == ([2, 30, 10, 3], 2)
        assert sent(input_type="document", prompt_name="query") == ([2, 20, 21, 10, 3], 3)
        assert sent(prompt="t50 ") == ([2, 50, 10, 3], 2)
        assert sent(prompt="t50 ", add_special_tokens=False) == ([50, 10], 1)
        assert sent(prompt="") == ([2, 10, 3], 0)
        found = error(bench.post({"input": "t10", "prompt_name": "other"}), 400)
        assert found["param"] == "prompt_name"
        assert "default, passage, query" in found["message"]
        assert error(bench.post({"input": "t10", "prompt_name": "query", "prompt": "x"}), 400)["param"] == "prompt"
        assert error(bench.post({"input": "t10", "input_type": "other"}), 400)["param"] == "input_type"
        assert error(bench.post({"input": [[10]], "prompt_name": "query"}), 400)["param"] == "prompt_name"
        vectors(bench.post({"input": [[10]], "input_type": "query"}))
        assert bench.broker.received[-1].inputs == [[10]]


# ---- models with a head ----


def model_for(task: str, **facts: Any) -> Any:
    """A state of the broker with such a model."""
    return msgspec.structs.replace(STATE, model=msgspec.structs.replace(MODEL, task=task, **facts))


def logits_of_tokens(ids: Sequence[int]) -> np.ndarray:
    """Two values for each token."""
    return np.stack([encode_ids([token_id], 2) for token_id in ids]).ravel()


@pytest.mark.parametrize("task", ["classify", "reward", "rerank"])
def test_logits_are_answered_as_vectors_are(task: str) -> None:
    labels = ("anger", "joy", "fear")
    with running_frontend(
        state=model_for(task, dimension=3, labels=labels), encode=lambda ids: np.array(ids[:3], np.float32)
    ) as bench:
        assert vectors(bench.post({"input": ["t10", "t20 t21"], "dimensions": 3})).tolist() == [[2, 10, 3], [2, 20, 21]]
        assert error(bench.post({"input": "t10", "dimensions": 2}), 400)["param"] == "dimensions"
        card = bench.get("/v1/models").json()["data"][0]
        assert (card["task"], card["dimension"]) == (task, 3)


def test_values_for_each_token_are_answered_flat() -> None:
    inputs = [[2, 10, 3], [2, *range(20, 40), 3], [11]]
    with running_frontend(state=model_for("token_reward", dimension=2), encode=logits_of_tokens) as bench:
        for encoding_format in ("float", "base64"):
            data = bench.post({"input": inputs, "encoding_format": encoding_format}).json()["data"]
            found = [item["embedding"] for item in data]
            if encoding_format == "base64":
                found = [np.frombuffer(base64.b64decode(each), "<f4") for each in found]
            for ids, values in zip(inputs, found, strict=True):
                assert np.array_equal(np.array(values, dtype=np.float32), logits_of_tokens(ids))
        assert bench.post({"input": inputs}).json()["usage"] == {"prompt_tokens": 26, "total_tokens": 26}
        for dimensions in (1, 2, 6):
            found = error(bench.post({"input": [[2, 10, 3]], "dimensions": dimensions}), 400)
            assert found["param"] == "dimensions"
            assert "for each token" in found["message"]


def test_values_of_another_number_of_tokens_are_an_error_of_their_request_alone() -> None:
    def encode(ids: Sequence[int]) -> np.ndarray:
        return logits_of_tokens(ids[1:] if ids[0] == 99 else ids)

    with running_frontend(state=model_for("token_reward", dimension=2), encode=encode) as bench:
        assert "4 values, the model has 6" in error(bench.post({"input": [[99, 10, 3]]}), 500)["message"]
        assert bench.post({"input": [[10]]}).status_code == 200


def test_a_rerankers_prompts_go_before_a_text_only_when_asked_for() -> None:
    prompts = {"query": "t20 ", "web": "t30 "}
    state = model_for("rerank", dimension=1, prompts=prompts, default_prompt_name="web")
    with running_frontend(state=state, encode=lambda ids: encode_ids(ids, 1)) as bench:
        for fields, expected in (
            ({}, [2, 10, 3]),
            ({"input_type": "query"}, [2, 10, 3]),
            ({"prompt_name": "web"}, [2, 30, 10, 3]),
        ):
            vectors(bench.post({"input": "t10", **fields}))
            assert bench.broker.received[-1].inputs == [expected]


# ---- bodies ----


@pytest.mark.parametrize(
    "content_type",
    [None, "application/x-www-form-urlencoded", "text/plain", "application/json; charset=utf-8", "APPLICATION/JSON"],
)
def test_the_body_is_json_whatever_it_is_called(bench: Bench, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    vectors(bench.post(b'{"input":"t10"}', headers=headers))


def test_gzip_is_unpacked(bench: Bench) -> None:
    body = b'{"input":"t10"}'
    headers = {"content-encoding": "gzip"}
    plain = vectors(bench.post(body))
    assert np.array_equal(vectors(bench.post(gzip.compress(body), headers=headers)), plain)
    assert np.array_equal(vectors(bench.post(gzip.compress(body[:5]) + gzip.compress(body[5:]), headers=headers)), plain)
    error(bench.post(body, headers=headers), 400)
    error(bench.post(gzip.compress(body)[:-4], headers=headers), 400)
    error(bench.post(gzip.compress(body) + b"tail", headers=headers), 400)
    assert np.array_equal(vectors(bench.post(body, headers={"content-encoding": "identity"})), plain)
    assert error(bench.post(body, headers={"content-encoding": "br"}), 415)["code"] == "unsupported_content_encoding"
    error(bench.post(gzip.compress(gzip.compress(body)), headers={"content-encoding": "gzip, gzip"}), 415)


def test_gzip_of_very_many_members_is_refused(bench: Bench) -> None:
    """Each member costs, however little is in it: 30 MB of empty ones would keep the event loop busy for ten seconds."""
    headers = {"content-encoding": "gzip"}
    body = b'{"input":"t10"}'
    several = b"".join(gzip.compress(bytes([each])) for each in body) + gzip.compress(b"") * 1_000
    vectors(bench.post(several, headers=headers))
    found = error(bench.post(gzip.compress(b" ") * 100_000 + gzip.compress(body), headers=headers), 400)
    assert "gzip members" in found["message"]


def test_the_body_limit_holds_in_both_directions() -> None:
    with running_frontend(HttpSettings(max_body_bytes=100_000)) as bench:

        def sized(size: int) -> bytes:
            return b'{"input":"t10"' + b" " * (size - 15) + b"}"

        vectors(bench.post(sized(100_000)))
        found = error(bench.post(sized(100_001)), 413)
        assert "100000" in found["message"]
        error(bench.post(sized(5_000_000)), 413)
        headers = {"content-encoding": "gzip"}
        vectors(bench.post(gzip.compress(sized(100_000)), headers=headers))
        error(bench.post(gzip.compress(sized(100_001)), headers=headers), 413)
        error(bench.post(gzip.compress(sized(50_000_000)), headers=headers), 413)
        answer = httpx.post(f"{bench.url}/v1/embeddings", content=(b" " * 10_000 for _ in range(11)))
        error(answer, 413)


def test_a_body_over_the_limit_is_told_to_the_operator(caplog: pytest.LogCaptureFixture) -> None:
    with running_frontend(HttpSettings(max_body_bytes=1000)) as bench, caplog.at_level("INFO", "packhorse_frontend"):
        error(bench.post(b" " * 1001), 413)
        error(bench.post(b"{"), 400)
    told = [record for record in caplog.records if record.message == "request failed"]
    assert [(record.levelname, record.status) for record in told] == [("INFO", 413)]
    assert "--max_body_bytes" in told[0].reason


def test_bodies_of_all_requests_together_are_bounded() -> None:
    """Each may have max_body_bytes, but not all connections at once. Small ones pass, and the room comes back."""
    with running_frontend(HttpSettings(max_body_bytes=1_000_000)) as bench, ThreadPoolExecutor(1) as pool:
        memory = bench.frontend.state.body_memory
        assert memory.max_bytes == 256 << 20
        memory.max_bytes = 1_500_000
        bench.broker.do(lambda: setattr(bench.broker, "is_holding", True))
        large = b'{"input":"t10"' + b" " * 900_000 + b"}"
        waiting = pool.submit(bench.post, large)
        wait_until(lambda: bench.broker.received)
        for body, headers in ((large, {}), (gzip.compress(large), {"content-encoding": "gzip"})):
            answer = bench.post(body, headers=headers)
            assert error(answer, 503)["code"] == "too_many_large_bodies"
            assert answer.headers["retry-after"] == "1"
        bench.broker.release()
        vectors(waiting.result())
        vectors(bench.post({"input": "t10"}))
        vectors(bench.post(large))
        wait_until(lambda: memory.held_bytes == 0)


def test_large_bodies_are_read_as_small_ones_are(bench: Bench) -> None:
    """Above 64 KiB a body is read in a thread, in steps."""
    pad = {"metadata": "x" * 100_000}
    for value in ("t10", ["t10", "t11"], [2, 10, 3], [[2, 10, 3], [10]]):
        small, large = bench.post({"input": value}), bench.post({"input": value, **pad})
        assert small.json() == large.json()
    lists = [[10 + number % 50] * 60 for number in range(1000)]
    assert np.array_equal(vectors(bench.post({"input": lists})), [encode_ids(ids) for ids in lists])
    for body, param in (
        ({"model": "tiny"}, "input"),
        ({"input": []}, "input"),
        ({"input": "t10", "dimensions": 1}, "dimensions"),
    ):
        assert error(bench.post({**body, **pad}), 400)["param"] == param
    assert error(bench.post({"input": "t10", "model": "other", **pad}), 404)["code"] == "model_not_found"
    assert error(bench.post({"input": ["t10"] * 40_000}), 400)["code"] == "too_many_inputs"


def test_three_megabytes_are_no_problem(bench: Bench) -> None:
    text = "t10 " * 50 + " " * 1500
    assert len(vectors(bench.post({"input": [text] * 1800}))) == 1800


def test_threads_do_not_disturb_each_other(bench: Bench) -> None:

    def ask(number: int) -> int:
        word, special = 10 + number % 100, number % 2 == 0
        texts = [f"t{word} t{word}"] * (1 + number % 5)
        answer = bench.post({"input": texts if number % 3 else texts[0], "add_special_tokens": special})
        ids = [2, word, word, 3] if special else [word, word]
        assert np.array_equal(vectors(answer)[0], encode_ids(ids))
        return answer.status_code

    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(ask, range(400))) == {200}


def test_health_answers_while_a_huge_text_is_refused(bench: Bench) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(bench.post, {"input": "t10 " * 5_000_000})
        answered = 0
        while not asked.done():
            assert bench.get("/health").status_code == 200
            answered += 1
    assert error(asked.result(), 400)["code"] == "input_too_long"
    assert answered > 0


# ---- large answers ----


def hold_answers(bench: Bench) -> None:
    bench.broker.do(lambda: setattr(bench.broker, "is_holding", True))


def test_an_answer_that_would_never_fit_into_memory_is_refused_before_anything_runs() -> None:
    """Few tokens can ask for very many values: a token-level model with many labels."""
    with running_frontend(state=model_for("token_reward", dimension=1 << 22)) as bench:
        found = error(bench.post({"input": [[2, 10, 3]] * 8}), 400)
        assert (found["param"], found["code"]) == ("input", "answer_too_large")
        assert "100663296 values" in found["message"]
        assert "67108864" in found["message"]
        assert not bench.broker.received
        assert bench.frontend.state.body_memory.held_bytes == 0


def test_answers_of_all_requests_together_are_bounded() -> None:
    """They count with the bodies, from before they are asked for until the client has them."""
    with running_frontend(state=model_for("token_reward", dimension=20_000)) as bench, ThreadPoolExecutor(1) as pool:
        bench.broker.encode = lambda ids: np.ones(20_000 * len(ids), np.float32)
        memory = bench.frontend.state.body_memory
        memory.max_bytes = 350_000
        hold_answers(bench)
        waiting = pool.submit(bench.post, {"input": [2, 10, 3]})
        wait_until(lambda: bench.broker.received)
        assert memory.held_bytes == 240_000
        answer = bench.post({"input": [2, 3]})
        assert error(answer, 503)["code"] == "too_many_large_bodies"
        assert answer.headers["retry-after"] == "1"
        bench.broker.release()
        assert vectors(waiting.result()).shape == (1, 60_000)
        assert vectors(bench.post({"input": [2, 3]})).shape == (1, 40_000)
        wait_until(lambda: memory.held_bytes == 0)


STALLING = b'{"input": [%s]}' % b",".join([b"[2,10,3]"] * 100)


def stalled(bench: Bench) -> socket.socket:
    """A client that asks for 24 MB of values, some 66 MB of text, and reads nothing but the head of its answer."""
    connection = bench.connect()
    connection.sendall(b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(STALLING) + STALLING)
    assert connection.recv(12) == b"HTTP/1.1 200"
    return connection


def test_an_answer_is_written_as_fast_as_its_client_reads() -> None:
    """What a client leaves unread is not piled up as text, and is forgotten when the client goes."""
    with running_frontend(state=model_for("token_reward", dimension=20_000)) as bench:
        bench.broker.encode = lambda ids: np.full(20_000 * len(ids), 0.12345678, np.float32)
        memory = bench.frontend.state.body_memory
        with stalled(bench):
            vectors(bench.post({"input": [2, 10, 3]}))
            assert memory.held_bytes == 100 * 240_000
            assert bench.frontend.in_flight == 1
        wait_until(lambda: memory.held_bytes == 0 and bench.frontend.in_flight == 0)


def test_an_answer_that_is_sent_whole_is_held_until_its_client_has_it() -> None:
    """Its text waits in the connection's buffer, and many clients that do not read must not pile it up beyond all bounds."""
    with running_frontend(state=model_for("token_reward", dimension=20_000)) as bench:
        bench.broker.encode = lambda ids: np.full(20_000 * len(ids), 0.12345678, np.float32)
        memory = bench.frontend.state.body_memory
        wait_until(lambda: not bench.server.server_state.connections)
        with bench.connect() as connection:
            protocol = wait_until(lambda: next(iter(bench.server.server_state.connections), None))
            protocol.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32_768)
            body = b'{"input": [[2],[3]]}'
            connection.sendall(b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            assert connection.recv(12) == b"HTTP/1.1 200"
            vectors(bench.post({"input": [2, 3]}))
            assert memory.held_bytes == 160_000
            rest = connection.recv(1000)
            while not rest.endswith(b"}}"):
                rest += connection.recv(65536)
            wait_until(lambda: memory.held_bytes == 0)
            connection.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
            assert read_answer(connection)[0] == 200


def test_answers_of_middling_size_are_counted_too() -> None:
    """As text they are more than a connection's buffer takes without a pause."""
    with running_frontend(state=model_for("token_reward", dimension=3_000)) as bench, ThreadPoolExecutor(1) as pool:
        bench.broker.encode = lambda ids: np.ones(3_000 * len(ids), np.float32)
        hold_answers(bench)
        waiting = pool.submit(bench.post, {"input": [2, 10]})
        wait_until(lambda: bench.broker.received)
        assert bench.frontend.state.body_memory.held_bytes == 24_000
        bench.broker.release()
        vectors(waiting.result())


def test_a_client_that_leaves_its_answer_unread_loses_its_connection() -> None:
    with running_frontend(HttpSettings(keep_alive=0.3), state=model_for("token_reward", dimension=20_000)) as bench:
        bench.broker.encode = lambda ids: np.full(20_000 * len(ids), 0.12345678, np.float32)
        with stalled(bench) as connection:
            wait_until(lambda: bench.frontend.in_flight == 0)
            assert bench.frontend.state.body_memory.held_bytes == 0
            rest = read_all(connection)
            assert not rest.endswith(b"\r\n0\r\n\r\n")
        assert bench.post({"input": [2, 10, 3]}).status_code == 200


def test_a_large_answer_is_whole_for_old_clients_too() -> None:
    """HTTP/1.0 knows no chunks."""
    with running_frontend(state=model_for("token_reward", dimension=20_000)) as bench:
        bench.broker.encode = lambda ids: np.full(20_000 * len(ids), 0.5, np.float32)
        head = b"POST /v1/embeddings HTTP/1.0\r\ncontent-length: %d\r\n\r\n"
        head, _, body = bench.exchange(head % len(STALLING) + STALLING).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert b"chunked" not in head
        assert json.loads(body) == bench.post(STALLING).json()
