"""Messages to frames and back: every type, and whatever bytes a socket may bring."""

from __future__ import annotations

import contextlib
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse_shared import codec
from packhorse_shared import messages as m
from packhorse_shared.codec import MAX_HEADER_BYTES, Decoder, encode
from packhorse_shared.errors import MalformedMessageError
from packhorse_shared.meter import CELLS, FRONTEND_CELLS

KINDS = list(codec._TYPES.values())
EVERYTHING = Decoder(*KINDS)

TEXT = st.text(max_size=20)
COUNT = st.integers(0, 1 << 40)
PID = st.integers(0, 1 << 22)
UNSIGNED = st.integers(0, (1 << 63) - 1)
MS = st.floats(0, 1e12)
LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=5)
CODES = st.sampled_from(m.ErrorCode)
PIECES = st.lists(TEXT | st.sampled_from(m.PairSlot), max_size=4).map(tuple)
OPTIONS = st.builds(m.EncodeOptions, prompt_tokens=st.integers(0, 9), scored=st.booleans())
MODEL = st.builds(
    m.ModelFacts,
    name=TEXT,
    task=st.sampled_from(get_args(m.Task)),
    labels=st.lists(TEXT, max_size=3).map(tuple),
    activation=TEXT,
    dimension=st.integers(1, 1 << 24),
    max_seq_len=st.integers(1, 1 << 22),
    dtype=TEXT,
    vocabulary_rows=st.integers(1, 1 << 40),
    matryoshka_dimensions=st.lists(st.integers(1, 9)).map(tuple),
    prompts=st.dictionaries(TEXT, TEXT, max_size=3),
    default_prompt_name=st.none() | TEXT,
    lowercase=st.booleans(),
    probabilities=st.sampled_from(get_args(m.Probabilities)),
    segments=st.integers(1, m.MAX_SEGMENTS),
    pair_text=st.none() | st.builds(m.PairText, plain=PIECES, prompted=PIECES, strips=st.booleans()),
    pair_problem=TEXT,
    canary=st.lists(st.integers(0, (1 << 31) - 1), min_size=1, max_size=m.MAX_CANARY_TOKENS).map(tuple),
    fingerprint=TEXT,
)
LIMITS = st.builds(m.WorkerLimits, max_batch_size=st.integers(1, 4096), max_num_tokens=st.integers(1, 1 << 22))
INDEX = st.integers(0, 10_000)
ROWS = st.lists(st.integers(1, 9), min_size=1, max_size=4)
OVERRIDES: dict[type[Any], st.SearchStrategy[Any]] = {
    m.Submit: st.builds(
        m.Submit,
        st.lists(
            st.builds(
                m.SubmittedRequest,
                rid=UNSIGNED,
                lengths=LENGTHS,
                ttl_ms=st.integers(0, 100_000_000),
                priority=st.integers(-100, 100),
                options=OPTIONS,
                resubmitted=st.booleans(),
            ),
            min_size=1,
            max_size=4,
        ),
    ),
    m.Tally: st.builds(
        m.Tally, st.lists(st.tuples(st.integers(0, FRONTEND_CELLS - 1), st.floats(0, 1e12)), min_size=1, max_size=9)
    ),
    m.MetricsReport: st.builds(m.MetricsReport, st.lists(st.floats(0, 1e12), min_size=CELLS, max_size=CELLS)),
    m.Cancel: st.builds(m.Cancel, st.lists(UNSIGNED, min_size=1, max_size=9)),
    m.BrokerState: st.builds(
        m.BrokerState,
        boot_id=UNSIGNED,
        draining=st.booleans(),
        queue_inputs=COUNT,
        queue_limit=COUNT,
        ready_workers=COUNT,
        loading_workers=COUNT,
        max_num_tokens=COUNT,
        retry_after_s=st.integers(1, 30),
        model=st.none() | MODEL,
    ),
    m.Result: st.builds(
        m.Result,
        st.lists(
            st.builds(m.RequestRows, UNSIGNED, st.lists(INDEX, min_size=1, max_size=4), ROWS, MS, MS), min_size=1, max_size=3
        ),
    ),
    m.RequestFailure: st.builds(m.RequestFailure, UNSIGNED, CODES, TEXT, st.integers(0, 120), st.none() | INDEX),
    m.StatusReport: st.builds(
        m.StatusReport,
        TEXT,
        st.none() | st.builds(m.ModelStatus, TEXT, TEXT, COUNT, COUNT, TEXT),
        st.builds(m.QueueStatus, COUNT, COUNT, MS, COUNT),
        st.lists(st.builds(m.WorkerStatus, TEXT, COUNT, TEXT, TEXT, COUNT, COUNT, COUNT, COUNT, MS, COUNT), max_size=2),
        st.builds(m.RateStatus, MS, MS, MS),
    ),
    m.WorkerAnnounce: st.builds(m.WorkerAnnounce, COUNT, TEXT, st.integers(-1, 63), PID, UNSIGNED, TEXT),
    m.WorkerHello: st.builds(m.WorkerHello, COUNT, TEXT, st.integers(-1, 63), PID, UNSIGNED, TEXT, MODEL, LIMITS),
    m.Beat: st.builds(m.Beat, UNSIGNED, MS, COUNT),
    m.Done: st.builds(
        m.Done,
        UNSIGNED,
        UNSIGNED,
        st.lists(st.integers(0, 9), min_size=1, max_size=4),
        st.lists(st.builds(m.InputFailure, st.integers(0, 4095), CODES, TEXT), max_size=2),
        MS,
    ),
    m.BatchFailed: st.builds(m.BatchFailed, UNSIGNED, UNSIGNED, CODES, TEXT, st.booleans()),
    m.Draining: st.builds(m.Draining, st.lists(UNSIGNED, max_size=8)),
    m.Bye: st.builds(m.Bye, TEXT),
    m.Join: st.builds(m.Join, UNSIGNED),
    m.Refused: st.builds(m.Refused, TEXT),
    m.Quit: st.builds(m.Quit, TEXT),
    m.Work: st.builds(m.Work, UNSIGNED, UNSIGNED, LENGTHS, st.lists(OPTIONS, max_size=2)),
    m.Introduce: st.builds(m.Introduce, UNSIGNED),
    m.FrontendHello: st.builds(m.FrontendHello, COUNT, st.integers(0, 31), PID),
}


def any_of(kind: type[Any]) -> st.SearchStrategy[Any]:
    return OVERRIDES.get(kind, st.builds(kind) if not kind.__struct_fields__ else st.nothing())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_every_message_survives_the_wire(kind: type[Any], data: st.DataObject) -> None:
    message = data.draw(any_of(kind))
    payload = bytes(message.payload_bytes() or 0)
    frames = encode(message, payload)
    assert len(frames) == 3
    again, carried = EVERYTHING.decode(frames)
    assert type(again) is kind
    assert again == message
    assert carried == payload
    if payload:
        with pytest.raises(MalformedMessageError, match="payload"):
            EVERYTHING.decode([frames[0], frames[1], payload[:-1]])


def test_every_type_has_a_code_of_its_own() -> None:
    assert len(set(codec._TYPES)) == len(set(KINDS)) == len(codec._TYPE_BYTES)


@given(frames=st.lists(st.binary(max_size=60), max_size=5))
def test_random_frames_are_malformed_or_a_message(frames: list[bytes]) -> None:
    with contextlib.suppress(MalformedMessageError):
        message, _ = EVERYTHING.decode(frames)
        assert type(message) in KINDS


@given(kind=st.sampled_from(KINDS), header=st.binary(max_size=60), payload=st.binary(max_size=8))
def test_random_headers(kind: type[Any], header: bytes, payload: bytes) -> None:
    with contextlib.suppress(MalformedMessageError):
        message, carried = EVERYTHING.decode([codec._TYPE_BYTES[kind], header, payload])
        assert message.payload_bytes() in (None, len(carried))


@given(kind=st.sampled_from(KINDS), data=st.data())
def test_a_changed_byte_is_malformed_or_another_message(kind: type[Any], data: st.DataObject) -> None:
    message = data.draw(any_of(kind))
    frames = encode(message, bytes(message.payload_bytes() or 0))
    header = bytearray(frames[1])
    if header:
        header[data.draw(st.integers(0, len(header) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(MalformedMessageError):
        EVERYTHING.decode([frames[0], header, frames[2]])


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        (m.Join, [], "length"),
        (m.Join, [1, 2], "length"),
        (m.Join, [-1], ">= 0"),
        (m.Join, [1.0], "int"),
        (m.Join, [True], "int"),
        (m.Join, {"boot_id": 1}, "array"),
        (m.Submit, [[[1, [0], 5]]], ">= 1"),
        (m.Submit, [[[1, [], 5]]], "length"),
        (m.Submit, [[]], "length"),
        (m.Beat, [1, float("nan"), 0], "float"),
        (m.RequestFailure, [1, "no such code", "x"], "enum"),
    ],
)
def test_headers_are_checked_field_by_field(kind: type[Any], fields: object, words: str) -> None:
    header = msgspec.msgpack.encode(fields)
    with pytest.raises(MalformedMessageError, match=words):
        EVERYTHING.decode([codec._TYPE_BYTES[kind], header, b""])


def test_what_a_socket_does_not_take_is_refused() -> None:
    with pytest.raises(MalformedMessageError, match="unknown type 31"):
        Decoder(m.Ping).decode(encode(m.Join(1)))
    with pytest.raises(MalformedMessageError, match="2 frames"):
        EVERYTHING.decode([b"\x04", b""])
    with pytest.raises(MalformedMessageError, match=f"limit {MAX_HEADER_BYTES}"):
        EVERYTHING.decode([b"\x04", bytes(MAX_HEADER_BYTES + 1), b""])
    with pytest.raises(MalformedMessageError, match="unknown type empty"):
        EVERYTHING.decode([b"", b"", b""])
    deep = b"\x91" * 50_000
    with pytest.raises(MalformedMessageError):
        EVERYTHING.decode([b"\x02", deep, b""])


def test_our_own_mistakes_are_caught_before_they_are_sent() -> None:
    with pytest.raises(AssertionError, match="payload"):
        encode(m.Ping(), b"x")
    with pytest.raises(AssertionError, match="header"):
        encode(m.Bye("x" * (MAX_HEADER_BYTES + 1)))
