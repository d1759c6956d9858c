"""POST /v1/rerank, /v2/rerank, /rerank and /v1/score over a real socket, with a fake broker behind it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from edges.fake_broker import MODEL, STATE, encode_ids
from edges.frontend_thread import Bench, running_frontend
from edges.test_http_embeddings import error
from model_facts import model_facts
from packhorse_frontend.endpoints.score import cosines
from packhorse_frontend.schema import RerankAnswer, RerankAnswerV2, ScoreAnswer
from packhorse_shared.messages import SEGMENT_SHIFT, PairSlot, PairText
from packhorse_shared.settings import HttpSettings

RERANKER = model_facts(task="rerank", dimension=1, segments=2, labels=("LABEL_0",), activation="Sigmoid")
SECOND = 1 << SEGMENT_SHIFT


def score_of(words: Sequence[int]) -> np.ndarray:
    """A "relevance" that depends on every word: between 0 and 1, a document's last word counts most."""
    ids = [word % SECOND for word in words if word >= SECOND]
    return np.array([(ids[-2] if len(ids) > 1 else 0) / 128], dtype=np.float32)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with running_frontend(state=msgspec.structs.replace(STATE, model=RERANKER), encode=score_of) as running:
        yield running


def rerank(bench: Bench, path: str = "/v1/rerank", **body: Any) -> dict[str, Any]:
    answer = bench.post({"query": "t10", **body}, path=path)
    assert answer.status_code == 200, answer.text
    return answer.json()


def order(answer: dict[str, Any]) -> list[tuple[int, float]]:
    return [(result["index"], result["relevance_score"]) for result in answer["results"]]


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_documents_come_best_first(bench: Bench, path: str) -> None:
    answer = rerank(bench, path, documents=["t20", {"text": "t50", "id": 7}, "t11", "t40 t50"])
    assert order(answer) == [(1, 50 / 128), (3, 50 / 128), (0, 20 / 128), (2, 11 / 128)]
    assert all(result.keys() == {"index", "relevance_score"} for result in answer["results"])


def test_the_pair_reaches_the_model_with_its_segments(bench: Bench) -> None:
    rerank(bench, documents=["t20 t21"])
    received = bench.broker.do(lambda: bench.broker.received[-1])
    assert received.inputs == [[2, 10, 3, SECOND + 20, SECOND + 21, SECOND + 3]]
    assert received.request.options.scored


def test_the_first_version_has_what_cohere_and_jina_read(bench: Bench) -> None:
    answer = rerank(bench, documents=["t20"], return_documents=True, model="tiny")
    assert answer.keys() == {"id", "object", "model", "results", "meta", "usage"}
    assert answer["model"] == "tiny"
    assert answer["usage"] == {"prompt_tokens": 5, "total_tokens": 5, "truncated_inputs": 0}
    assert answer["results"] == [{"index": 0, "relevance_score": 20 / 128, "document": {"text": "t20"}}]
    assert answer["meta"]["api_version"] == {"version": "1"}
    msgspec.convert(answer, RerankAnswer)


def test_the_second_version_has_id_results_and_meta_only(bench: Bench) -> None:
    answer = rerank(bench, "/v2/rerank", documents=["t20"])
    assert answer.keys() == {"id", "results", "meta"}
    assert answer["meta"] == {
        "api_version": {"version": "2"},
        "billed_units": {"search_units": 1},
        "tokens": {"input_tokens": 5, "output_tokens": 0},
    }
    msgspec.convert(answer, RerankAnswerV2)


@pytest.mark.parametrize(("top_n", "count"), [(None, 3), (1, 1), (3, 3), (9, 3)])
def test_the_best_so_many(bench: Bench, top_n: int | None, count: int) -> None:
    for path in ("/v1/rerank", "/v2/rerank"):
        assert len(rerank(bench, path, documents=["t20", "t30", "t40"], top_n=top_n)["results"]) == count


def test_none_at_all_means_all_in_the_first_version_only(bench: Bench) -> None:
    assert len(rerank(bench, documents=["t20", "t30"], top_n=0)["results"]) == 2
    problem = error(bench.post({"query": "t10", "documents": ["t20"], "top_n": 0}, path="/v2/rerank"), 400)
    assert problem["param"] == "top_n"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"documents": ["t20"]}, "query"),
        ({"query": None, "documents": ["t20"]}, "query"),
        ({"query": "", "documents": ["t20"]}, "query"),
        ({"query": 5, "documents": ["t20"]}, "query"),
        ({"query": "t10"}, "documents"),
        ({"query": "t10", "documents": []}, "documents"),
        ({"query": "t10", "documents": "t20"}, "documents"),
        ({"query": "t10", "documents": ["t20", 5]}, "documents"),
        ({"query": "t10", "documents": ["t20", {"title": "t5"}]}, "documents"),
        ({"query": "t10", "documents": [[10, 11]]}, "documents"),
        ({"query": "t10", "documents": ["t20"], "top_n": -1}, "top_n"),
        ({"query": "t10", "documents": ["t20"], "max_tokens_per_doc": 0}, "max_tokens_per_doc"),
        ({"query": "t10", "documents": ["t20"], "return_documents": "yes"}, "return_documents"),
        ({"query": "t10", "documents": ["t20"], "prompt_name": "nope"}, "prompt_name"),
    ],
)
def test_what_is_wrong_is_named(bench: Bench, body: dict[str, Any], param: str) -> None:
    for path in ("/v1/rerank", "/v2/rerank"):
        assert error(bench.post(body, path=path), 400)["param"] == param


def test_half_a_character_in_a_document_is_named(bench: Bench) -> None:
    for filler in ("", "x" * 70_000):
        body = b'{"query":"t10","documents":["t20",{"id":7,"text":"a\\ud800"}],"filler":"%b"}' % filler.encode()
        problem = error(bench.post(body, path="/v1/rerank"), 400)
        assert (problem["param"], problem["message"].partition(": ")[0]) == ("documents", "documents[1].text")


def test_what_is_required_is_said_in_the_endpoints_own_words(bench: Bench) -> None:
    problem = error(bench.post({"query": "t10"}, path="/v1/rerank"), 400)
    assert problem["message"] == "documents is required: a list of texts, or of objects with a text"


def test_a_query_of_any_size_is_refused_by_its_name(bench: Bench) -> None:
    for size in (60_000, 70_000, 3_000_000):
        problem = error(bench.post({"query": "t10 " * (size // 4), "documents": ["t20"]}, path="/v1/rerank"), 400)
        assert (problem["param"], problem["code"]) == ("query", "input_too_long")


@pytest.mark.parametrize(
    "query", ["null", '""', "5", "[]", '["t10"]', "{}", '"\\ud800"', '"a', '"t10","query":""', '"t10","query":null']
)
def test_queries_of_large_bodies_are_read_like_those_of_small_ones(bench: Bench, query: str) -> None:
    small, large = (
        bench.post(f'{{"filler":"{filler}","documents":["t20"],"query":{query}}}'.encode(), path="/v1/rerank")
        for filler in ("", "x" * 70_000)
    )
    assert error(large, 400)["param"] == error(small, 400)["param"]


def test_another_model_is_404(bench: Bench) -> None:
    assert error(bench.post({"query": "t10", "documents": ["t20"], "model": "x"}, path="/v1/rerank"), 404)["param"] == "model"


def test_a_document_that_is_too_long_is_cut_and_told(bench: Bench) -> None:
    answer = rerank(bench, documents=["t20", "t30 " * 100, "t40"])
    assert answer["usage"]["truncated_inputs"] == 1
    assert answer["meta"]["warnings"] == ["document 1 was cut: too long for the model, or for max_tokens_per_doc"]
    received = bench.broker.do(lambda: bench.broker.received[-1].inputs)
    assert [len(each) for each in received] == [5, 64, 5]
    assert received[1][-1] == SECOND + 3
    assert "warnings" not in rerank(bench, documents=["t20"])["meta"]


def test_documents_are_cut_to_the_tokens_asked_for(bench: Bench) -> None:
    answer = rerank(bench, "/v2/rerank", documents=["t20 t21 t22", "t30"], max_tokens_per_doc=2)
    received = bench.broker.do(lambda: bench.broker.received[-1].inputs)
    assert received[0] == [2, 10, 3, SECOND + 20, SECOND + 21, SECOND + 3]
    assert len(answer["meta"]["warnings"]) == 1


def test_coheres_range_of_priorities_is_taken(bench: Bench) -> None:
    for asked, given in ((0, 0), (-100, -100), (100, 100), (999, 100)):
        rerank(bench, "/v2/rerank", documents=["t20"], priority=asked)
        assert bench.broker.do(lambda: bench.broker.received[-1].request.priority) == given
    assert (
        error(bench.post({"query": "t10", "documents": ["t20"], "priority": 1000}, path="/v2/rerank"), 400)["param"]
        == "priority"
    )


def test_a_query_that_leaves_no_room_is_refused(bench: Bench) -> None:
    problem = error(bench.post({"query": "t10 " * 61, "documents": ["t20"]}, path="/v1/rerank"), 400)
    assert problem["param"] == "query"
    assert "64" in problem["message"]
    assert bench.post({"query": "t10 " * 60, "documents": ["t20"]}, path="/v1/rerank").status_code == 200


def test_more_documents_than_inputs_are_refused() -> None:
    state = msgspec.structs.replace(STATE, model=RERANKER)
    with running_frontend(HttpSettings(max_inputs=3), state=state, encode=score_of) as bench:
        problem = error(bench.post({"query": "t10", "documents": ["t20"] * 4}, path="/v1/rerank"), 400)
        assert (problem["param"], problem["code"]) == ("documents", "too_many_inputs")
        assert bench.post({"query": "t10", "documents": ["t20"] * 3}, path="/v1/rerank").status_code == 200


def test_large_bodies_and_answers_are_whole(bench: Bench) -> None:
    documents = [{"text": f"t{20 + index % 90} " + "x" * 500, "n": index} for index in range(1500)]
    answer = rerank(bench, documents=documents, return_documents=True)
    assert sorted(result["index"] for result in answer["results"]) == list(range(1500))
    assert all(result["document"]["text"] == documents[result["index"]]["text"] for result in answer["results"])
    scores = [result["relevance_score"] for result in answer["results"]]
    assert scores == sorted(scores, reverse=True)


def test_scores_are_float32_in_short(bench: Bench) -> None:
    text = bench.post({"query": "t10", "documents": ["t13"]}, path="/v1/rerank").text
    assert '"relevance_score":0.1015625}' in text


def test_the_answer_tells_how_long_its_stages_took(bench: Bench) -> None:
    headers = bench.post({"query": "t10", "documents": ["t13"]}, path="/v1/rerank").headers
    assert (headers["x-packhorse-queue-ms"], headers["x-packhorse-encode-ms"]) == ("0.100", "0.200")
    assert 0 < float(headers["x-packhorse-tokenize-ms"]) < 10_000


def test_prompts_go_before_the_query() -> None:
    model = msgspec.structs.replace(RERANKER, prompts={"web": "t90 ", "own": "t91 "}, default_prompt_name="web")
    with running_frontend(state=msgspec.structs.replace(STATE, model=model), encode=score_of) as bench:
        for fields, first in (({}, 90), ({"prompt_name": "own"}, 91), ({"prompt": "t92 "}, 92), ({"prompt": ""}, 10)):
            rerank(bench, documents=["t20"], **fields)
            assert bench.broker.do(lambda: bench.broker.received[-1].inputs[0][1]) == first


def test_a_chat_template_makes_one_text_of_a_pair() -> None:
    pieces = ("t70 ", PairSlot.QUERY, " t71 ", PairSlot.DOCUMENT, " t72")
    form = PairText(plain=pieces, prompted=("t73 ", PairSlot.PROMPT, *pieces))
    model = model_facts(task="rerank", dimension=1, pair_text=form)
    with running_frontend(
        state=msgspec.structs.replace(STATE, model=model), encode=lambda ids: np.array([len(ids)], np.float32)
    ) as bench:
        rerank(bench, documents=["t20"])
        assert bench.broker.do(lambda: bench.broker.received[-1].inputs) == [[70, 10, 71, 20, 72]]
        rerank(bench, documents=["t20"], prompt="t80 ")
        assert bench.broker.do(lambda: bench.broker.received[-1].inputs) == [[73, 80, 70, 10, 71, 20, 72]]
        assert rerank(bench, documents=["t20 " * 100])["usage"]["prompt_tokens"] == 64


# ---- the wrong model ----


@pytest.mark.parametrize(
    ("task", "path", "place"),
    [
        ("embedding", "/v1/rerank", "/v1/embeddings"),
        ("embedding", "/v2/rerank", "/v1/score"),
        ("classify", "/rerank", "/v1/classify"),
        ("reward", "/v1/rerank", "/v1/embeddings"),
        ("classify", "/v1/score", "/v1/classify"),
        ("token_reward", "/v1/score", "/v1/embeddings"),
        ("embedding", "/v1/classify", "/v1/embeddings"),
        ("rerank", "/v1/classify", "/v1/rerank"),
        ("reward", "/v1/classify", "/v1/embeddings"),
    ],
)
def test_a_model_for_something_else_says_what_it_is(task: str, path: str, place: str) -> None:
    with running_frontend(state=msgspec.structs.replace(STATE, model=model_facts(task=task))) as bench:
        body = {"query": "t10", "documents": ["t20"], "text_1": "t10", "text_2": "t20", "input": "t10"}
        problem = error(bench.post(body, path=path), 400)
        assert problem["code"] == "wrong_task"
        assert place in problem["message"]
        assert bench.broker.received == []


def test_a_reranker_whose_pairs_cannot_be_made_says_why() -> None:
    model = model_facts(task="rerank", dimension=1, pair_problem="its chat template rhymes")
    with running_frontend(state=msgspec.structs.replace(STATE, model=model)) as bench:
        for path in ("/v1/rerank", "/v1/score"):
            body = {"query": "t10", "documents": ["t20"], "text_1": "t10", "text_2": "t20"}
            assert "its chat template rhymes" in error(bench.post(body, path=path), 400)["message"]


# ---- scores ----


def scores(bench: Bench, first: Any, second: Any, **fields: Any) -> list[float]:
    answer = bench.post({"text_1": first, "text_2": second, **fields}, path="/v1/score")
    assert answer.status_code == 200, answer.text
    body = answer.json()
    msgspec.convert(body, ScoreAnswer)
    assert [item["index"] for item in body["data"]] == list(range(len(body["data"])))
    assert {item["object"] for item in body["data"]} == {"score"}
    return [item["score"] for item in body["data"]]


def test_a_reranker_scores_one_with_many_or_each_with_its_own(bench: Bench) -> None:
    assert scores(bench, "t10", "t20") == [20 / 128]
    assert scores(bench, "t10", ["t20", "t30"]) == [20 / 128, 30 / 128]
    assert scores(bench, ["t10"], ["t20", "t30"]) == [20 / 128, 30 / 128]
    assert scores(bench, ["t11", "t12"], ["t20", "t30"]) == [20 / 128, 30 / 128]
    received = bench.broker.do(lambda: bench.broker.received[-1].inputs)
    assert [each[1] for each in received] == [11, 12]


@pytest.mark.parametrize(
    ("first", "second", "param"),
    [
        (None, "t20", "text_1"),
        ("t10", None, "text_2"),
        ([], "t20", "text_1"),
        (["t10", "t11"], ["t20", "t21", "t22"], "text_1"),
        (["t10", "t11"], "t20", "text_1"),
        (5, "t20", "text_1"),
        ("t10", ["t20", 5], "text_2"),
        ("t10", [[10]], "text_2"),
        ("t10", ["t20", "t30 " * 64], "text_2"),
        (["t10", "t11 " * 64], ["t20", "t30"], "text_1"),
    ],
)
def test_what_is_wrong_with_pairs_is_named(bench: Bench, first: Any, second: Any, param: str) -> None:
    assert error(bench.post({"text_1": first, "text_2": second}, path="/v1/score"), 400)["param"] == param


def test_a_pair_that_is_too_long_is_cut_only_when_asked(bench: Bench) -> None:
    long = ["t20", "t30 " * 80]
    problem = error(bench.post({"text_1": "t10", "text_2": long}, path="/v1/score"), 400)
    assert problem["message"].startswith("text_2[1] ")
    assert "64" in problem["message"]
    assert scores(bench, "t10", long, truncate_prompt_tokens=-1) == [20 / 128, 30 / 128]
    answer = bench.post({"text_1": "t10", "text_2": long, "truncate_prompt_tokens": 10}, path="/v1/score")
    assert answer.json()["usage"]["truncated_inputs"] == 1
    assert len(bench.broker.do(lambda: bench.broker.received[-1].inputs)[1]) == 10


def test_an_embedding_model_gives_cosines() -> None:
    with running_frontend() as bench:
        found = scores(bench, "t10", ["t10", "t20", "t30 t31"])
        one = encode_ids([2, 10, 3])
        expected = [float(one @ encode_ids(ids)) for ids in ([2, 10, 3], [2, 20, 3], [2, 30, 31, 3])]
        assert np.allclose(found, expected, atol=1e-6)
        assert scores(bench, ["t10", "t20"], ["t10", "t20"]) == pytest.approx([1, 1])
        too_long = error(bench.post({"text_1": ["t10", "t10"], "text_2": ["t20", "t30 " * 80]}, path="/v1/score"), 400)
        assert (too_long["param"], too_long["message"][:9]) == ("text_2", "text_2[1]")
        assert MODEL.task == "embedding"


def test_cosines_of_odd_vectors() -> None:
    rows = np.array([[0, 0], [1e30, 1e30], [1e-30, 0], [-3, 0]], dtype=np.float32)
    with np.errstate(all="raise"):
        assert cosines(rows[1:2], rows).tolist() == pytest.approx([0, 1, 2**-0.5, -(2**-0.5)], abs=1e-6)
        assert cosines(rows, rows).tolist() == pytest.approx([0, 1, 1, 1])
