"""Large bodies, read in steps: the same outcome as the parser of small ones, whatever the body; and no step without bound."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse_frontend.bodies.cursor import AbandonedError, Cursor
from packhorse_frontend.bodies.inputs import IdLists, Texts, read_input, read_texts
from packhorse_frontend.bodies.large_body import MAX_REST_BYTES, Fields, read_large_body
from packhorse_frontend.bodies.large_field import MAX_DOCUMENT_BYTES, InputLimits
from packhorse_frontend.bodies.parsing import BodyParser
from packhorse_frontend.problems import Problem
from packhorse_frontend.schema import DetokenizeRequest, EmbeddingsRequest, RerankRequest, ScoreRequest

PARSER = BodyParser(EmbeddingsRequest)
FIELDS_OF_BODY: Fields = {"input": "input"}
MAX_INPUTS, ROWS = 20, 128
LIMITS = InputLimits(MAX_INPUTS, ROWS)


def outcome(inputs: Texts | IdLists) -> Any:
    if isinstance(inputs, Texts):
        return list(inputs.texts), inputs.listed
    return inputs.ids.tolist(), inputs.lengths, inputs.listed


def small(body: bytes) -> Any:
    try:
        request = PARSER.parse(body)
        return outcome(read_input(request.input, "input", MAX_INPUTS, ROWS)), request.model
    except Problem as problem:
        return problem


def large(body: bytes) -> Any:
    try:
        request, found = read_large_body(body, PARSER, FIELDS_OF_BODY, LIMITS, lambda: False)
        return outcome(found.get("input") or read_input(request.input, "input", MAX_INPUTS, ROWS)), request.model
    except Problem as problem:
        return problem


def assert_alike(body: bytes, *, has_one_fault: bool = False) -> None:
    expected, found = small(body), large(body)
    if not isinstance(expected, Problem):
        assert found == expected
        return
    assert isinstance(found, Problem), (expected.message, found)
    assert found.status == expected.status == 400, (expected.message, found.message)
    if has_one_fault and expected.param is not None:
        assert found.param == expected.param
        assert found.code == expected.code


@pytest.fixture(autouse=True, params=[32, 41, 128 * 1024])
def step(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Steps of a few bytes meet every place at which a body can be cut. The shortest holds an id, or a pair of escapes."""
    monkeypatch.setattr(Cursor, "step_bytes", request.param)
    return int(request.param)


TEXTS = st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from(
    ["", "中文", "a😀b", '"', "\\", "[]", '","', "]", "\ufeff"]
)
IDS = st.lists(st.integers(0, 140), min_size=1, max_size=8)
ODD = st.sampled_from([None, True, 1.5, 10.0, -1, 2**31, 2**64, {}, {"a": [1]}, [], [[]], [None], ["a"], [[1]]])
INPUTS = TEXTS | IDS | st.lists(TEXTS, max_size=25) | st.lists(IDS, max_size=25) | ODD | st.lists(TEXTS | IDS | ODD, max_size=4)
FIELDS = st.dictionaries(
    st.sampled_from(["model", "user", "foo", "prompt", "inputs"]),
    TEXTS | ODD | st.lists(TEXTS | IDS | ODD, max_size=3),
    max_size=4,
)


@settings(max_examples=400, deadline=None)
@given(INPUTS, FIELDS, st.booleans(), st.sampled_from([None, 0, 2]), st.booleans())
def test_values_of_all_kinds_are_read_alike(
    value: Any, fields: dict[str, Any], is_ascii: bool, indent: int | None, is_last: bool
) -> None:
    content = {**fields, "input": value} if is_last else {"input": value, **fields}
    text = json.dumps(content, ensure_ascii=is_ascii, indent=indent)
    assert_alike(text.encode())


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(
        [
            b'{"input":["t10","\\u00e9]",""],"x":{"y":[1,{}]}}',
            b'{"input":[[1,2],[3]],"model":"m"}',
            b'{"x":"a\\"b","input":[1,2,3]}',
        ]
    ),
    st.data(),
)
def test_broken_bodies_are_refused_alike(body: bytes, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(body)))
    junk = data.draw(
        st.sampled_from([b"", b",", b'"', b"]", b"[", b"{", b"}", b":", b"\\", b"\xff", b"\x00", b"1", b"-", b" ", b"null"])
    )
    removed = data.draw(st.integers(0, 2))
    assert_alike(body[:place] + junk + body[place + removed :])


@pytest.mark.parametrize(
    "body",
    [
        b'\xef\xbb\xbf{"input":"a"}', b"", b" ", b"null", b"[]", b'{"input":"a"} x', b'{"input":"a"}}', b'{"input":["a",]}',
        b'{"input":[1,]}', b'{"input":[,1]}', b'{"input":[[1],]}', b'{"input":[[1] [2]]}', b'{"input":[[1,[2]]]}',
        b'{"input":[01]}', b'{"input":[-0]}', b'{"input":[1e2]}', b'{"input":"\xed\xa0\x80"}', b'{"input":"\xc3"}',
        b'{"input":["\\ud83d","a"]}', b'{"input":["\\ud83d\\u0041"]}', b'{"input":["\\ude00"]}', b'{"input":"a\nb"}',
        b'{"input":"\\x"}', b'{"input":"a', b'{"input":[1', b'{"input":[1],"input":["a"]}', b'{"input":["a"],"input":null}',
        b'{"input":nul}', b'{"input":[tru]}', b'{"input":[true,"a"]}', b'{"input":["a",true]}', b'{"input":["a",nope]}',
        b'{"input":[{"a":1}]}', b'{"input":["a",{"a":1}]}', b'{"a":}', b'{"a":[}', b'{"input":["a"]', b'{"input":["a"],',
        b'{"input":[1,"]"]}', b'{"input":["]",1]}', b'{"input":[[1, "]"]]}', b'{"input":[["]"]]}', b'{"input":[[1 "]"]]}',
        b'{"input":["a"] "b":1}', b'{"x":"\\ud83d","input":"a"}', b'{"x":{"y":"\\ud83d"},"input":"a"}', b'{"input":[1]',
        b'{"model":5,"input":[1]}', b'{"model":"m","input":[1]}', b'{1:2}', b'{"input"}',
        b'{"input":"\xf0\x9f\x98\x80\xf0\x9f\x98\x80\xf0\x9f\x98\x80"}', b'{"input":"\x80\x80\x80\x80\x80\x80\x80\x80\x80"}',
    ],
)  # fmt: skip
def test_single_bodies_are_read_alike(body: bytes) -> None:
    assert_alike(body, has_one_fault=True)


def test_ids_are_named_by_their_place(step: int) -> None:
    for value, where in (
        ([1] * 50 + [128], "input[50]"),
        ([[5], [1] * 50 + [-1]], "input[1][50]"),
        ([1] * 50 + [True], "input[50]"),
    ):
        found = large(json.dumps({"input": value}).encode())
        assert isinstance(found, Problem)
        assert where in found.message
        assert found.param == "input"


@pytest.mark.parametrize("element", [b"[]", b'""', b'"a",1', b"{}", b'{"a":"[","b":1}', b'["x",2]', b'"\\u00e9\\"]"'], ids=repr)
def test_what_is_ignored_is_passed_in_few_steps(element: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step for each of its brackets and texts would take minutes for a body of the largest size."""
    monkeypatch.setattr(Cursor, "step_bytes", 128 * 1024)
    asked = 0

    def count() -> bool:
        nonlocal asked
        asked += 1
        return False

    cursor = Cursor(b'{"x":[' + b",".join([element] * 20_000) + b"]} ", count)
    cursor.skip_value(lambda: None)
    assert cursor.body[cursor.at :] == b" "
    assert asked < 100


def test_an_input_too_many_ends_the_reading(step: int) -> None:
    for element in (b'"a"', b"[1]"):
        found = large(b'{"input":[' + element + (b"," + element) * MAX_INPUTS + b", this is not even JSON")
        assert (found.code, "20" in found.message) == ("too_many_inputs", True)


@pytest.mark.parametrize(
    "filler",
    [
        b'"x":"' + b"a" * MAX_REST_BYTES + b'"',
        b'"x":[' + b"[" * MAX_REST_BYTES,
        b'"x":' + b" " * MAX_REST_BYTES + b"1",
        b'"x":[' + b"1," * MAX_REST_BYTES + b"1]",
    ],
)
def test_all_but_the_input_is_bounded(filler: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cursor, "step_bytes", 128 * 1024)
    for body in (b'{"input":"a",' + filler + b"}", b"{" + filler + b',"input":"a"}'):
        found = large(body)
        assert isinstance(found, Problem)
        assert (found.status, str(MAX_REST_BYTES) in found.message) == (400, True)


def test_reading_ends_when_nobody_waits(step: int) -> None:
    for value in ("a" * 100, ["a"] * 10, [1] * 100, [[1] * 10] * 10):
        asked = iter([False, True])
        with pytest.raises(AbandonedError):
            read_large_body(
                json.dumps({"input": value}).encode(), PARSER, FIELDS_OF_BODY, LIMITS, lambda asked=asked: next(asked)
            )


def test_large_ids_become_one_array(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cursor, "step_bytes", 128 * 1024)
    numbers = np.arange(300_000) % ROWS
    body = json.dumps({"input": [[5], numbers.tolist()]}).encode()
    _, found = read_large_body(body, PARSER, FIELDS_OF_BODY, LIMITS, lambda: False)
    inputs = found["input"]
    assert isinstance(inputs, IdLists)
    assert inputs.ids.dtype == np.int32
    assert np.array_equal(inputs.ids[1:], numbers)
    assert inputs.lengths == [1, 300_000]


# ---- the fields of the other bodies ----

BODIES: dict[type[Any], Fields] = {
    RerankRequest: {"documents": "documents"},
    ScoreRequest: {"text_1": "texts", "text_2": "texts"},
    DetokenizeRequest: {"tokens": "ids"},
}


def read_both_ways(kind: type[Any], body: bytes) -> list[Any]:
    """What the parser of small bodies makes of a body, and what the reader of large ones does."""
    parser = BodyParser(kind)

    def values(request: Any, found: dict[str, Texts | IdLists]) -> Any:
        read = {}
        for field, content in BODIES[kind].items():
            value = getattr(request, field)
            if field not in found:
                found[field] = (
                    read_input(value, field, MAX_INPUTS, ROWS) if content == "ids" else read_texts(value, field, MAX_INPUTS)
                )
            read[field] = outcome(found[field])
        return read

    outcomes: list[Any] = []
    for is_large in (False, True):
        try:
            if is_large:
                outcomes.append(values(*read_large_body(body, parser, BODIES[kind], LIMITS, lambda: False)))
            else:
                outcomes.append(values(parser.parse(body), {}))
        except Problem as problem:
            outcomes.append((problem.status, problem.param))
    return outcomes


DOCUMENTS = st.lists(TEXTS | st.builds(lambda text: {"id": [1, {}], "text": text}, TEXTS), max_size=22)
VALUES = INPUTS | DOCUMENTS | st.just([{"text": 5}]) | st.just([{"id": 1}]) | st.just(["a", {"text": None}])


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(list(BODIES)), st.data())
def test_the_fields_of_other_bodies_are_read_alike(kind: type[Any], data: st.DataObject) -> None:
    odd = data.draw(st.sampled_from(list(BODIES[kind])))
    content = {"query": "q", **{field: data.draw(VALUES) if field == odd else ["a"] for field in BODIES[kind]}}
    small_outcome, large_outcome = read_both_ways(kind, json.dumps(content, ensure_ascii=data.draw(st.booleans())).encode())
    assert large_outcome == small_outcome


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_broken_documents_are_refused_alike(data: st.DataObject) -> None:
    body = b'{"query":"q","documents":["a",{"text":"\\u00e9]","x":[{}]},"c"],"top_n":1}'
    place = data.draw(st.integers(0, len(body)))
    junk = data.draw(st.sampled_from([b"", b",", b'"', b"]", b"[", b"{", b"}", b":", b"\\", b"\xff", b"1", b" ", b"null"]))
    broken = body[:place] + junk + body[place + data.draw(st.integers(0, 2)) :]
    small_outcome, large_outcome = read_both_ways(RerankRequest, broken)
    if isinstance(small_outcome, dict):
        assert large_outcome == small_outcome
    else:
        assert large_outcome[0] == small_outcome[0] == 400


def test_an_object_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cursor, "step_bytes", 128 * 1024)
    body = b'{"documents":["a",{"text":"' + b"a" * MAX_DOCUMENT_BYTES + b'"}]}'
    with pytest.raises(Problem, match="documents\\[1\\] is an object of more than"):
        read_large_body(body, BodyParser(RerankRequest), BODIES[RerankRequest], LIMITS, lambda: False)
