"""The three batching knobs from Triton's config.pbtxt."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse_shared.errors import SettingsError
from packhorse_shared.triton import from_triton, parse_text_format

FULL = """
# A Triton model configuration as people write them.
name: "encoder"
platform: 'onnxruntime_onnx' ;
max_batch_size: 64
input [
  { name: "ids" data_type: TYPE_INT64 dims: [ -1 ] },
  { name: "mask", data_type: TYPE_INT64, dims: [ -1, 2 ] reshape: { shape: [ ] } }
]
instance_group [ { kind: KIND_GPU count: 2 gpus: [0, 1] } ]
dynamic_batching {
  preferred_batch_size: [ 8, 16 ]
  max_queue_delay_microseconds: 250
  priority_levels: 2
  default_queue_policy < timeout_action: REJECT max_queue_size: 512 >
  priority_queue_policy { key: 1 value: { max_queue_size: 3 } }
}
parameters: { key: "note" value: { string_value: "a } # \\" b" "continued" } }
[my.extension]: 1.5e-3
[type.googleapis.com/a.b] { x: -inf }
"""


def values(path: Path, text: str) -> dict[str, str]:
    file = path / "config.pbtxt"
    file.write_text(text, encoding="utf-8")
    return {name: given.texts[0] for name, given in from_triton(file).items()}


def test_a_whole_file(tmp_path: Path) -> None:
    assert values(tmp_path, FULL) == {"max_batch_size": "64", "max_queue_delay": "0.00025", "max_queue_size": "512"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("dynamic_batching { }", {}),
        ("dynamic_batching: { max_queue_delay_microseconds: 0 }", {"max_queue_delay": "0.0"}),
        ("max_batch_size:1;max_batch_size:2", {"max_batch_size": "2"}),
        ("dynamic_batching { default_queue_policy { max_queue_size: 0 } }", {}),
        ("dynamic_batching [ { max_queue_delay_microseconds: 5 } ]", {"max_queue_delay": "5e-06"}),
    ],
)
def test_parts(tmp_path: Path, text: str, expected: dict[str, str]) -> None:
    assert values(tmp_path, text) == expected


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("max_batch_size: many", 1, "max_batch_size: must be a whole number"),
        ("\nmax_batch_size: -1", 2, "whole number"),
        ('max_batch_size: "4"', 1, "whole number"),
        ("max_batch_size: { }", 1, "whole number"),
        ("dynamic_batching: 5", 1, "must be a block"),
        ("dynamic_batching {\n max_queue_delay_microseconds: 5", 2, "the end of the file"),
        ("a: 1\n}", 2, "the name of a field"),
        ("a 1", 1, "expected : or {"),
        ("a: [1 2]", 1, "expected ,"),
        ("a:\n\n", 3, "expected a value"),
        ("a: 1\nb: ?", 2, "unexpected character '?'"),
        ('a: "open', 1, "unexpected character"),
        ("{" * 3, 1, "the name of a field"),
        ("a {" * 100, 1, "deeper than 64"),
    ],
)
def test_mistakes_name_the_line(tmp_path: Path, text: str, line: int, words: str) -> None:
    with pytest.raises(SettingsError) as problem:
        values(tmp_path, text)
    assert f"config.pbtxt:{line}" in str(problem.value)
    assert words in str(problem.value)
    assert "\n" not in str(problem.value)


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="limit"):
        values(tmp_path, "#" * (1 << 20) + "#")


@given(text=st.text(max_size=80) | st.text(alphabet="ab_:{}[]<>,;#\"'\\ \n1-.", max_size=80))
def test_no_text_crashes_the_reader(text: str) -> None:
    with contextlib.suppress(SettingsError):
        for field, line, _ in parse_text_format(text, "f"):
            assert field
            assert 1 <= line <= text.count("\n") + 1
