"""The frontend's bookkeeping of open requests, message by message: no sockets, no clock."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from packhorse_frontend.exchange import Answered, Exchange, OpenRequest
from packhorse_frontend.rows import RowShape
from packhorse_shared.codec import MAX_HEADER_BYTES, encode
from packhorse_shared.messages import ErrorCode, RequestFailure, RequestRows, Result

ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)


def opened(exchange: Exchange, rid: int = 1, lengths: tuple[int, ...] = (2, 1, 3), deadline: float = 60.0) -> OpenRequest:
    request = OpenRequest(rid, np.arange(sum(lengths), dtype=np.int32), lengths, deadline, RowShape(4))
    exchange.open(request)
    return request


def rows(rid: int, indexes: list[int]) -> tuple[Result, bytes]:
    return Result([RequestRows(rid, indexes, [4] * len(indexes), 0.0, 0.0)]), ROWS[indexes].tobytes()


def test_all_requests_of_a_turn_ride_in_one_message() -> None:
    exchange = Exchange()
    opened(exchange, 1)
    opened(exchange, 2, (5,), deadline=10.5)
    [(submit, payload)] = exchange.take_submits(now=10.0)
    assert [(each.rid, each.lengths, each.ttl_ms) for each in submit.requests] == [(1, [2, 1, 3], 50_000), (2, [5], 500)]
    assert np.frombuffer(payload, "<i4").tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4]
    assert exchange.take_submits(now=10.0) == []


@pytest.mark.parametrize(("requests", "inputs", "length"), [(20_000, 1, 1), (3, 10_000, 70_000 // 10), (1, 10_000, 4_000_00)])
def test_no_header_is_larger_than_the_protocol_allows(requests: int, inputs: int, length: int) -> None:
    exchange = Exchange()
    for rid in range(requests):
        request = OpenRequest(2**62 + rid, np.zeros(0, np.int32), [length] * inputs, 1e5, RowShape(4))
        exchange.open(request)
    messages = exchange.take_submits(now=0.0)
    assert sum(len(submit.requests) for submit, _ in messages) == requests
    assert all(len(msgspec.msgpack.encode(submit)) <= MAX_HEADER_BYTES for submit, _ in messages)


def test_rows_of_several_batches_make_one_answer_in_input_order() -> None:
    exchange = Exchange()
    opened(exchange)
    exchange.take_submits(0.0)
    assert exchange.on_result(*rows(1, [2, 0])) == []
    [answered] = exchange.on_result(*rows(1, [1]))
    assert isinstance(answered, Answered)
    assert np.array_equal(answered.encoded.rows, ROWS)
    assert len(exchange) == 0
    assert exchange.on_result(*rows(1, [1])) == []


def test_a_row_that_comes_twice_counts_once() -> None:
    exchange = Exchange()
    opened(exchange)
    exchange.on_result(*rows(1, [0, 1]))
    assert exchange.on_result(*rows(1, [0, 1])) == []
    assert exchange.duplicate_rows == 2
    assert len(exchange.on_result(*rows(1, [2]))) == 1


def test_one_result_may_serve_several_requests() -> None:
    exchange = Exchange()
    opened(exchange, 1, (1,))
    opened(exchange, 2, (1,))
    result = Result([RequestRows(rid, [0], [4], 0.0, 0.0) for rid in (2, 9, 1)])
    endings = exchange.on_result(result, ROWS.tobytes())
    assert [(ending.rid, ending.encoded.rows.tolist()) for ending in endings if isinstance(ending, Answered)] == [
        (2, [ROWS[0].tolist()]),
        (1, [ROWS[2].tolist()]),
    ]


@pytest.mark.parametrize(("indexes", "sizes"), [([3], [4]), ([0], [3]), ([0, 1], [4]), ([0], [4, 4]), ([10_000], [4])])
def test_rows_that_cannot_be_right_fail_their_request(indexes: list[int], sizes: list[int]) -> None:
    exchange = Exchange()
    opened(exchange)
    exchange.take_submits(0.0)
    payload = np.zeros(sum(sizes), np.float32).tobytes()
    [failure] = exchange.on_result(Result([RequestRows(1, indexes, sizes, 0.0, 0.0)]), payload)
    assert isinstance(failure, RequestFailure)
    assert failure.code is ErrorCode.FORWARD_FAILED
    assert [cancel.rids for cancel in exchange.take_cancels()] == [[1]]


def test_a_row_that_is_not_finite_names_its_input() -> None:
    exchange = Exchange()
    opened(exchange)
    bad = ROWS.copy()
    bad[1, 2] = np.inf
    [failure] = exchange.on_result(Result([RequestRows(1, [0, 2], [4, 4], 0.0, 0.0)]), bad[:2].tobytes())
    assert isinstance(failure, RequestFailure)
    assert (failure.code, failure.index) == (ErrorCode.NON_FINITE_OUTPUT, 2)


def test_rows_with_values_for_each_token_have_the_size_of_their_input() -> None:
    exchange = Exchange()
    exchange.open(OpenRequest(1, np.zeros(6, np.int32), (2, 1, 3), 60.0, RowShape(2, per_token=True)))
    values = np.arange(12, dtype=np.float32)
    payload = bytearray(values[[6, 7, 8, 9, 10, 11, 0, 1, 2, 3]].tobytes())
    assert exchange.on_result(Result([RequestRows(1, [2, 0], [6, 4], 0.0, 0.0)]), payload) == []
    payload[:] = bytes(len(payload))
    [answered] = exchange.on_result(Result([RequestRows(1, [1], [2], 0.0, 0.0)]), values[4:6].tobytes())
    assert isinstance(answered, Answered)
    assert [row.tolist() for row in answered.encoded.rows] == [[0, 1, 2, 3], [4, 5], [6, 7, 8, 9, 10, 11]]


@pytest.mark.parametrize(("indexes", "sizes"), [([0], [2]), ([0, 1], [4, 4]), ([2], [4]), ([0, 2], [6, 4])])
def test_rows_of_another_number_of_tokens_fail_their_request(indexes: list[int], sizes: list[int]) -> None:
    exchange = Exchange()
    exchange.open(OpenRequest(1, np.zeros(6, np.int32), (2, 1, 3), 60.0, RowShape(2, per_token=True)))
    payload = np.zeros(sum(sizes), np.float32).tobytes()
    [failure] = exchange.on_result(Result([RequestRows(1, indexes, sizes, 0.0, 0.0)]), payload)
    assert isinstance(failure, RequestFailure)
    assert failure.code is ErrorCode.FORWARD_FAILED
    assert "the model has" in failure.message


def test_a_row_for_each_token_that_is_not_finite_names_its_input() -> None:
    exchange = Exchange()
    exchange.open(OpenRequest(1, np.zeros(6, np.int32), (2, 1, 3), 60.0, RowShape(2, per_token=True)))
    values = np.zeros(8, np.float32)
    values[3] = np.nan
    [failure] = exchange.on_result(Result([RequestRows(1, [1, 2], [2, 6], 0.0, 0.0)]), values.tobytes())
    assert isinstance(failure, RequestFailure)
    assert (failure.code, failure.index) == (ErrorCode.NON_FINITE_OUTPUT, 2)


def test_only_what_the_broker_has_is_cancelled() -> None:
    exchange = Exchange()
    opened(exchange, 1)
    exchange.give_up(1)
    assert exchange.take_submits(0.0) == []
    assert exchange.take_cancels() == []
    for rid in range(2, 12_002):
        opened(exchange, rid, (1,))
    exchange.take_submits(0.0)
    for rid in range(2, 12_002):
        exchange.give_up(rid)
    cancels = exchange.take_cancels()
    assert sum(len(cancel.rids) for cancel in cancels) == 12_000
    for cancel in cancels:
        encode(cancel)


def test_resubmitted_requests_start_over() -> None:
    exchange = Exchange()
    opened(exchange, 1)
    exchange.take_submits(0.0)
    opened(exchange, 2, (1,))
    exchange.on_result(*rows(1, [0, 1]))
    exchange.resubmit()
    [(submit, _)] = exchange.take_submits(30.0)
    assert {(each.rid, each.resubmitted, each.ttl_ms) for each in submit.requests} == {(1, True, 30_000), (2, False, 30_000)}
    assert exchange.on_result(*rows(1, [2])) == []
    [answered] = exchange.on_result(*rows(1, [0, 1]))
    assert answered.rid == 1


def test_a_failure_ends_its_request_once() -> None:
    exchange = Exchange()
    opened(exchange)
    exchange.take_submits(0.0)
    failure = RequestFailure(1, ErrorCode.TIMEOUT, "late")
    assert exchange.on_failure(failure) == [failure]
    assert exchange.on_failure(failure) == []
    assert exchange.take_cancels() == []
