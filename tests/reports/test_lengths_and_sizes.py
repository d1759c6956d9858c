"""Lists and bodies of all sizes: what is served is served whole, what is not is refused with the limit that it is over."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edges.test_http_embeddings import error, vectors
from reports.asking import ask
from stack import Stack
from standin_stack import StandInFactory

pytestmark = pytest.mark.process

MIB = 1 << 20
BODY = b'{"input":"t10"}'


def body_of(size: int) -> bytes:
    """A good body of so many bytes."""
    return BODY[:-1] + b" " * (size - len(BODY)) + b"}"


@pytest.mark.parametrize("words", [1, 62, 63, 500])
def test_a_text_and_a_list_of_it_have_one_rule(stack: Stack, words: int) -> None:
    """The limit of length held against single texts only, or against lists only."""
    text = "t10 " * words
    one, listed = ask(stack, {"input": text}), ask(stack, {"input": [text]})
    assert one.status_code == listed.status_code == (200 if words + 2 <= 64 else 400)
    if one.status_code == 200:
        assert np.array_equal(vectors(one), vectors(listed))
        assert one.json()["usage"]["prompt_tokens"] == words + 2


def test_a_list_longer_than_a_batch_is_split_and_put_together_again(stack: Stack) -> None:
    """The size of a forward pass taken for a limit of the client's list: bulk loads of documents fail at once."""
    texts = [f"t{10 + number} " + f"t{40 + number} " * (number % 9) for number in range(25)]
    answer = ask(stack, {"input": texts})
    found = vectors(answer)
    assert [item["index"] for item in answer.json()["data"]] == list(range(25))
    alone = np.concatenate([vectors(ask(stack, {"input": text})) for text in texts])
    assert np.abs(found - alone).max() <= 1e-5


@pytest.mark.parametrize(("count", "status"), [(2048, 200), (2049, 400), (6000, 400)])
def test_every_vector_or_one_clear_refusal(stack: Stack, count: int, status: int) -> None:
    """Thousands of inputs in one call end the engine, or only a part of the vectors comes back."""
    answer = ask(stack, {"input": ["t10"] * count, "encoding_format": "base64"})
    assert answer.status_code == status
    if status == 200:
        assert [item["index"] for item in answer.json()["data"]] == list(range(count))
    else:
        found = error(answer, 400)
        assert "2048" in found["message"]
        assert str(count) in found["message"]
    vectors(ask(stack, {"input": "t10"}))


def test_three_megabytes_are_below_every_limit_of_bytes(stack: Stack) -> None:
    """A hidden limit of two megabytes, far below what a list of documents takes."""
    short_items = [f"t10 t11 {' ' * 140}" for _ in range(20_000)]
    assert error(ask(stack, {"input": short_items}), 400)["code"] == "too_many_inputs"
    assert len(vectors(ask(stack, {"input": [f"t10 {' ' * 1500}"] * 2000}))) == 2000


def test_a_body_above_the_limit_is_not_collected_first(stack: Stack) -> None:
    """What is refused for its size was held in memory as a whole before."""
    (frontend,) = stack.processes("frontend")
    limit = 32 * MIB
    with peak_of(frontend.pid) as peak:
        found = error(ask(stack, body_of(limit + 1)), 413)
        assert str(limit) in found["message"]
        assert "max_body_bytes" in found["message"]
        announced = [b" " * MIB] * 33  # without a content-length: counted as it comes
        assert error(stack.http.post("/v1/embeddings", content=iter(announced), timeout=60), 413)["code"] == "body_too_large"
    assert peak[1] - peak[0] < 2 * limit
    vectors(ask(stack, {"input": "t10"}))


def test_the_limit_of_bytes_is_what_the_flag_says(make_standin: StandInFactory) -> None:
    """A flag for the size of bodies that is taken and does nothing, in one direction or in the other."""
    low = make_standin("--max_body_bytes=100000")
    high = make_standin(f"--max_body_bytes={20 * MIB}")
    for each in (low, high):
        each.start()
    low.wait_ready()
    high.wait_ready()
    assert "100000" in error(ask(low, body_of(101_000)), 413)["message"]
    vectors(ask(low, body_of(99_000)))
    assert len(vectors(ask(high, {"input": [f"t10 {' ' * 4500}"] * 2000}))) == 2000
    assert str(20 * MIB) in error(ask(high, body_of(20 * MIB + 1)), 413)["message"]


@contextlib.contextmanager
def peak_of(pid: int) -> Iterator[list[int]]:
    """Resident bytes of a process at the begin of the block, and their maximum since, when it ends."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the kernel's way to forget the maximum so far
    found = [_status_bytes(pid, "VmRSS")]
    yield found
    found.append(_status_bytes(pid, "VmHWM"))


def _status_bytes(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
