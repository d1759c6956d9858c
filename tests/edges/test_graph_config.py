"""Configurations of CUDA graphs: what is kept, what is refused and in which words, in Python, YAML and the environment."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import inspect
import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from packhorse import EncodeCudaGraphConfig, EncodeExtraInputSpec, Encoder
from packhorse_shared.arguments import load_settings
from packhorse_shared.errors import SettingsError
from packhorse_shared.extra_inputs import DTYPES, ENCODE_ARGUMENTS, RESERVED_INPUTS
from packhorse_shared.graph_config import MAX_SIZES, GraphConfigError, read_graph_config
from packhorse_shared.settings import MAX_TOKENS, Settings

TYPES = EncodeExtraInputSpec("token_type_ids", ("num_tokens",), "int64")

# ---- what is kept ----


def test_nothing_given() -> None:
    config = EncodeCudaGraphConfig()
    assert dataclasses.asdict(config) == {
        "batch_sizes": None,
        "num_tokens": None,
        "seq_lens": None,
        "enable_padding": False,
        "max_batch_size": None,
        "max_num_token": None,
        "max_seq_len": None,
        "extra_model_inputs": (),
        "mode": "encode",
    }
    assert repr(config) == "EncodeCudaGraphConfig()"
    assert config.to_dict() == {}


def test_lists_are_sorted_without_doubles_and_plain() -> None:
    config = EncodeCudaGraphConfig(
        batch_sizes=[4, 1, 4], num_tokens=np.array([64, 32]), seq_lens=range(1, 4), max_batch_size=4, enable_padding=True
    )
    assert (config.batch_sizes, config.num_tokens, config.seq_lens) == ((1, 4), (32, 64), (1, 2, 3))
    assert all(type(size) is int for size in config.num_tokens or ())
    assert config == EncodeCudaGraphConfig(
        batch_sizes=(1, 4), num_tokens={32, 64}, seq_lens=[3, 2, 1], max_batch_size=4, enable_padding=True
    )
    assert eval(repr(config)) == config  # as it would be written


def test_whole_numbers_of_numpy_and_torch_are_whole_numbers() -> None:
    config = EncodeCudaGraphConfig(num_tokens=torch.tensor([8, 4]), seq_lens=[np.uint8(3)], max_batch_size=np.int64(5))
    assert config == EncodeCudaGraphConfig(num_tokens=[4, 8], seq_lens=[3], max_batch_size=5)
    assert EncodeCudaGraphConfig(max_seq_len=torch.tensor(9)).max_seq_len == 9  # type: ignore[arg-type]
    spec = EncodeExtraInputSpec("x", ("num_tokens", np.int64(4)), "int64")  # type: ignore[arg-type]
    assert spec.shape == ("num_tokens", 4)
    assert type(spec.shape[1]) is int
    json.dumps(spec.to_dict())


def test_0_and_none_count_as_not_given() -> None:
    given: dict[str, Any] = {"max_batch_size": 0, "max_num_token": np.int64(0), "max_seq_len": 0}
    assert EncodeCudaGraphConfig(**given, batch_sizes=None) == EncodeCudaGraphConfig()
    assert EncodeCudaGraphConfig(**given, num_tokens=[5]).num_tokens == (5,)
    nothing = {each.name: None for each in dataclasses.fields(EncodeCudaGraphConfig)}
    assert read_graph_config(nothing) == EncodeCudaGraphConfig()


def test_it_cannot_be_changed_but_copied_and_sent() -> None:
    config = EncodeCudaGraphConfig(num_tokens=[8], extra_model_inputs=[TYPES])
    for frozen, name in ((config, "num_tokens"), (TYPES, "dtype")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(frozen, name, None)
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    assert len({config, copy.copy(config)}) == 1
    assert dataclasses.replace(config, num_tokens=[9]).num_tokens == (9,)


SIZES = st.none() | st.lists(st.integers(1, MAX_TOKENS), min_size=1, max_size=5)
SPECS = st.lists(
    st.builds(
        EncodeExtraInputSpec,
        st.sampled_from(["a", "b", "c"]),
        st.tuples(st.lists(st.integers(1, 9), max_size=2), st.sampled_from(["num_tokens", "batch_size"])).map(
            lambda found: [*found[0], found[1], 3]
        ),
        st.sampled_from(DTYPES),
    ),
    unique_by=lambda spec: spec.name,
    max_size=3,
)


@given(
    config=st.builds(
        EncodeCudaGraphConfig,
        batch_sizes=SIZES,
        num_tokens=SIZES,
        seq_lens=SIZES,
        enable_padding=st.booleans(),
        extra_model_inputs=SPECS,
    )
)
def test_plain_values_make_the_same_configuration(config: EncodeCudaGraphConfig) -> None:
    assert read_graph_config(json.loads(json.dumps(config.to_dict()))) == config
    assert read_graph_config(config) is config


def test_a_specification() -> None:
    spec = EncodeExtraInputSpec(name="bias", shape=[2, "num_tokens", 5], dtype=torch.bfloat16)
    assert (spec.name, spec.shape, spec.dtype) == ("bias", (2, "num_tokens", 5), "bfloat16")
    assert (spec.axis, spec.per, spec.sizes(7, 3)) == (1, "num_tokens", (2, 7, 5))
    ages = EncodeExtraInputSpec("ages", ("batch_size",), "torch.int8")
    assert (ages.axis, ages.per, ages.sizes(7, 3), ages.dtype) == (0, "batch_size", (3,), "int8")
    assert repr(spec) == "EncodeExtraInputSpec(name='bias', shape=(2, 'num_tokens', 5), dtype='bfloat16')"


def test_number_formats_are_torchs() -> None:
    for word in DTYPES:
        assert EncodeExtraInputSpec("x", ("num_tokens",), getattr(torch, word)).dtype == word


def test_what_the_engine_knows_is_handed_on_as_it_knows_it() -> None:
    int32 = EncodeExtraInputSpec("token_type_ids", ("num_tokens",), "int32")
    embeddings = EncodeExtraInputSpec("inputs_embeds", ("num_tokens", 8), "float32")
    other = EncodeExtraInputSpec("x", ("num_tokens", 8), "float32")
    assert [spec.handed_dtype("bfloat16") for spec in (int32, embeddings, other)] == ["int64", "bfloat16", "float32"]


def test_the_arguments_of_encode_are_all_known() -> None:
    parameters = inspect.signature(Encoder.encode).parameters.values()
    assert {each.name for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD} == ENCODE_ARGUMENTS


# ---- what is refused ----


def _message(value: object) -> str:
    """The name of a case: of its two values the message."""
    return value[:60] if isinstance(value, str) else ""


SIZE = f"a whole number from 1 to {MAX_TOKENS}"
WRONG_CONFIGS: list[tuple[dict[str, Any], str]] = [
    *(({name: []}, f"{name}: is an empty list; leave it out, or give") for name in ("batch_sizes", "num_tokens", "seq_lens")),
    ({"batch_sizes": 4}, "batch_sizes: 4 is no list; give whole numbers such as [1, 2, 4]"),
    ({"batch_sizes": "124"}, "batch_sizes: '124' is no list"),
    ({"batch_sizes": {1: 2}}, "batch_sizes: {1: 2} is no list"),
    ({"num_tokens": [8, 0]}, f"num_tokens: has the entry 0; each must be {SIZE}"),
    ({"num_tokens": [-3]}, "num_tokens: has the entry -3"),
    ({"num_tokens": [1.0]}, "num_tokens: has the entry 1.0"),
    ({"num_tokens": [True]}, "num_tokens: has the entry True"),
    ({"num_tokens": ["8"]}, "num_tokens: has the entry '8'"),
    ({"num_tokens": [None]}, "num_tokens: has the entry None"),
    ({"num_tokens": [[8]]}, "num_tokens: has the entry [8]"),
    ({"num_tokens": np.array([[8]])}, "num_tokens: has the entry array([8])"),
    ({"num_tokens": torch.tensor([[8]])}, "num_tokens: has the entry tensor([8])"),
    ({"num_tokens": [torch.zeros(3, 3)]}, "num_tokens: has the entry tensor([["),
    ({"num_tokens": torch.tensor(1)}, "num_tokens: tensor(1) is no list; give whole numbers such as [1, 2, 4]"),
    ({"batch_sizes": np.array(5)}, "batch_sizes: array(5) is no list; give whole numbers such as [1, 2, 4]"),
    ({"seq_lens": torch.tensor(1, device="meta")}, "seq_lens: tensor("),
    ({"seq_lens": torch.ones(1, dtype=torch.int64, device="meta")}, "seq_lens: has the entry tensor("),
    *(
        ({"num_tokens": given}, f"num_tokens: has the entry {shown}; each must be {SIZE}")
        for given, shown in (
            ([torch.tensor(True)], "tensor(True)"),
            (torch.tensor([True]), "tensor(True)"),
            ([np.True_], "np.True_"),
            (np.array([True]), "np.True_"),
            ([np.array(True)], "array(True)"),
        )
    ),
    ({"max_num_token": torch.tensor(True)}, "max_num_token: tensor(True) is not allowed"),
    ({"max_num_token": torch.tensor(False)}, "max_num_token: tensor(False) is not allowed"),
    ({"max_num_token": np.array([1, 2])}, "max_num_token: array([1, 2]) is not allowed"),
    ({"max_num_token": np.array([0, 0])}, "max_num_token: array([0, 0]) is not allowed"),
    ({"seq_lens": [MAX_TOKENS + 1]}, f"seq_lens: has the entry {MAX_TOKENS + 1}"),
    ({"seq_lens": [10**5000]}, "seq_lens: has the entry a number of 16610 bits"),
    ({"seq_lens": range(1, MAX_SIZES + 2)}, f"seq_lens: has {MAX_SIZES + 1} entries, limit {MAX_SIZES}"),
    (
        {"batch_sizes": [1, 8], "max_batch_size": 16},
        "max_batch_size: 16 is not the largest of batch_sizes, which is 8; make them agree, or leave one of them out",
    ),
    ({"num_tokens": [1, 8], "max_num_token": 4}, "max_num_token: 4 is not the largest of num_tokens, which is 8"),
    ({"seq_lens": [1, 8], "max_seq_len": 9}, "max_seq_len: 9 is not the largest of seq_lens, which is 8"),
    (
        {"max_batch_size": -1},
        f"max_batch_size: -1 is not allowed; give a whole number from 0 to {MAX_TOKENS}; 0 is as if not given",
    ),
    ({"max_num_token": False}, "max_num_token: False is not allowed"),
    ({"max_num_token": 8.0}, "max_num_token: 8.0 is not allowed"),
    ({"max_seq_len": MAX_TOKENS + 1}, f"max_seq_len: {MAX_TOKENS + 1} is not allowed"),
    ({"max_seq_len": [8]}, "max_seq_len: [8] is not allowed"),
    ({"enable_padding": 1}, "enable_padding: 1 is not allowed; give true or false"),
    ({"mode": np.array(["encode", "x"])}, "mode: array("),
    ({"mode": "decode"}, "mode: 'decode' is not allowed; encoders have the mode encode only"),
    ({"extra_model_inputs": "x"}, "extra_model_inputs: 'x' is no list; give a list of EncodeExtraInputSpec"),
    ({"extra_model_inputs": TYPES.to_dict()}, "extra_model_inputs: {"),
    ({"extra_model_inputs": [1]}, "extra_model_inputs: entry 0: 1 is no EncodeExtraInputSpec, nor a mapping; give name, shape"),
    ({"extra_model_inputs": [TYPES, TYPES]}, "extra_model_inputs: declares token_type_ids twice; declare it once"),
    ({"extra_model_inputs": [TYPES] * 33}, "extra_model_inputs: has 33 entries, limit 32"),
    ({"extra_model_inputs": [TYPES, {"name": "x"}]}, "extra_model_inputs: entry 1: shape is missing; give name, shape, dtype"),
    (
        {"extra_model_inputs": [{**TYPES.to_dict(), "type": 1}]},
        "extra_model_inputs: entry 0: 'type' is no key of it; give name, shape, dtype; did you mean dtype?",
    ),
    (
        {"extra_model_inputs": [{**TYPES.to_dict(), "name": "x", "dtype": "int"}]},
        "extra_model_inputs: entry 0: dtype of x: 'int' is not allowed",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG_CONFIGS, ids=_message)
def test_a_configuration_that_contradicts_itself(arguments: dict[str, Any], message: str) -> None:
    for make, prefix in (
        (lambda: EncodeCudaGraphConfig(**arguments), ""),
        (lambda: read_graph_config(arguments), "cuda_graph_config."),
    ):
        with pytest.raises(ValueError, match="^" + re.escape(prefix + message)) as caught:
            make()
        assert isinstance(caught.value, SettingsError)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 400


def test_unknown_keys_are_refused() -> None:
    with pytest.raises(TypeError, match="batch_size"):
        EncodeCudaGraphConfig(batch_size=[1])  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        EncodeCudaGraphConfig([1])  # type: ignore[call-arg]
    with pytest.raises(
        GraphConfigError, match=r"^cuda_graph_config\.batch_size: is no key of it, which holds .*; did you mean batch_sizes\?"
    ):
        read_graph_config({"batch_size": [1]})
    with pytest.raises(GraphConfigError, match=r"^cuda_graph_config\.7: is no key of it, which holds batch_sizes, num_tokens"):
        read_graph_config({7: [1]})
    for wrong in ([1], "x", 7):
        with pytest.raises(
            GraphConfigError, match=r"^cuda_graph_config: is .*, and must be a mapping, which holds batch_sizes"
        ):
            read_graph_config(wrong)


WRONG_SPECS: list[tuple[tuple[Any, Any, Any], str]] = [
    *(((name, ("num_tokens",), "int64"), "name: ") for name in ("", "a b", "1a", "class", "None", 5, None, "x" * 129, "a.b")),
    (("class", ("num_tokens",), "int64"), "name: 'class' is not allowed; give an argument of the model's forward by its name"),
    *(
        ((name, ("num_tokens",), "int64"), f"name: {name} is reserved, as the engine sets it")
        for name in sorted(RESERVED_INPUTS)
    ),
    *(
        ((name, ("num_tokens",), "int64"), f"name: {name} is reserved, as it is an argument")
        for name in sorted(ENCODE_ARGUMENTS)
    ),
    (("x", (), "int64"), "shape of x: () is not allowed; give a size for each dimension, exactly one of which is"),
    (("x", "num_tokens", "int64"), "shape of x: 'num_tokens' is not allowed"),
    (("x", None, "int64"), "shape of x: None is not allowed"),
    (("x", (1,) * 8 + ("num_tokens",), "int64"), "shape of x: (1, "),
    (("x", (5,), "int64"), "shape of x: (5,) is not allowed; give a size for each dimension"),
    (("x", ("tokens",), "int64"), "shape of x: ('tokens',) is not allowed"),
    (("x", ("num_tokens", "batch_size"), "int64"), "shape of x: ('num_tokens', 'batch_size') is not allowed"),
    (("x", ("num_tokens", "num_tokens"), "int64"), "shape of x: ('num_tokens', 'num_tokens') is not allowed"),
    (("x", ("num_tokens", 0), "int64"), f"shape of x: has 0; a fixed size is {SIZE}"),
    (("x", ("num_tokens", -1), "int64"), "shape of x: has -1"),
    (("x", ("num_tokens", True), "int64"), "shape of x: has True"),
    (("x", ("num_tokens", np.True_), "int64"), "shape of x: has np.True_"),
    (("x", ("num_tokens", torch.tensor(True)), "int64"), "shape of x: has tensor(True)"),
    (("x", ("num_tokens", 2.0), "int64"), "shape of x: has 2.0"),
    (("x", ("num_tokens", None), "int64"), "shape of x: has None"),
    (("x", ("num_tokens", 10**5000), "int64"), "shape of x: has a number of 16610 bits"),
    (
        ("x", (MAX_TOKENS, "batch_size", 2), "int64"),
        f"shape of x: {(MAX_TOKENS, 'batch_size', 2)} has {2 * MAX_TOKENS} numbers",
    ),
    *(
        (("x", ("num_tokens",), dtype), f"dtype of x: {dtype!r} is not allowed; give one of bool, int8")
        for dtype in ("int", "torch.long", "complex64", "", 5, None, torch.complex64)
    ),
    (
        ("token_type_ids", ("num_tokens", 1), "int64"),
        "token_type_ids: has the shape ('num_tokens', 1) and dtype int64; they are",
    ),
    (("token_type_ids", ("batch_size",), "int64"), "token_type_ids: has the shape"),
    (("token_type_ids", ("num_tokens",), "float32"), "token_type_ids: has the shape ('num_tokens',) and dtype float32"),
    (("inputs_embeds", ("num_tokens",), "float32"), "inputs_embeds: has the shape ('num_tokens',) and dtype float32; they are"),
    (("inputs_embeds", (8, "num_tokens"), "float32"), "inputs_embeds: has the shape"),
    (("inputs_embeds", ("num_tokens", 8), "int64"), "inputs_embeds: has the shape"),
    (
        ("inputs_embeds", ("num_tokens", 8), "float64"),
        "inputs_embeds: has the shape ('num_tokens', 8) and dtype float64; they are (\"num_tokens\", width) and float16, bfl",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG_SPECS, ids=_message)
def test_a_specification_that_cannot_be(arguments: tuple[Any, Any, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)) as caught:
        EncodeExtraInputSpec(*arguments)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


# ---- YAML and the environment ----

WRONG_FILES = [
    ("  batchsizes: [1]", "c.yaml:3: cuda_graph_config.batchsizes: is no key of it, which holds batch_sizes, num_tokens"),
    ("  seq_lens: [8]\n  num_tokens: []", "c.yaml:4: cuda_graph_config.num_tokens: is an empty list"),
    (
        "  batch_sizes: [1, 8]\n  max_batch_size: 4",
        "c.yaml:4: cuda_graph_config.max_batch_size: 4 is not the largest of batch_sizes",
    ),
    ("  batch_sizes: [a]", "c.yaml:3: cuda_graph_config.batch_sizes: has the entry 'a'"),
    ("  batch_sizes: [8, 010]", "c.yaml:3: cuda_graph_config.batch_sizes: has the entry '010'"),
    ("  max_seq_len: 1:30", "c.yaml:3: cuda_graph_config.max_seq_len: '1:30' is not allowed"),
    ("  batch_sizes: [true]", "c.yaml:3: cuda_graph_config.batch_sizes: has the entry True"),
    ("  batch_sizes: [1.5]", "c.yaml:3: cuda_graph_config.batch_sizes: has the entry 1.5"),
    ("  batch_sizes: {a: 1}", "c.yaml:3: cuda_graph_config.batch_sizes: {'a': 1} is no list"),
    ("  enable_padding: 1", "c.yaml:3: cuda_graph_config.enable_padding: 1 is not allowed; give true or false"),
    ("  mode: decode", "c.yaml:3: cuda_graph_config.mode: 'decode' is not allowed"),
    ("  max_num_token: !!python/object/apply:os.getpid []", "c.yaml:3: cuda_graph_config.max_num_token: "),
    ("  seq_lens: [8]\n  seq-lens: [9]", "c.yaml:4: cuda_graph_config.seq-lens: is set twice in this file"),
    ("  [1]: 2", "c.yaml:3: cuda_graph_config: a key must be the name of a setting"),
    ("  num_tokens: &a [1]\n  seq_lens: *a", "c.yaml:4: alias *a: aliases are not supported; write the value out"),
    ("  - 1", "c.yaml:3: cuda_graph_config: is [1], and must be a mapping, which holds batch_sizes"),
    ("  7", "c.yaml:3: cuda_graph_config: is 7, and must be a mapping"),
    (
        "  extra_model_inputs:\n  - {name: token_type_ids, shape: [num_tokens], dtype: int64}",
        "c.yaml:4: cuda_graph_config.extra_model_inputs: an HTTP request carries texts or token ids only, so a server cannot",
    ),
]


def load(path: Path) -> Settings:
    return load_settings(argparse.Namespace(config=str(path)), {})


@pytest.mark.parametrize(("text", "message"), WRONG_FILES)
def test_a_file_stops_the_start_with_its_line_and_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"port: 8001\ncuda_graph_config:\n{text}\n")
    with pytest.raises(SettingsError, match="^" + re.escape(f"{tmp_path}/{message}")) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_right(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "cuda_graph_config:\n  batch-sizes: [8, 1]\n  max_num_token: 512\n  max_batch_size: 0\n  seq_lens: [64]\n"
        "  enable_padding: yes\n  extra_model_inputs: []\n  mode: encode\n"
    )
    config = read_graph_config(load(path).model.cuda_graph_config)
    assert config == EncodeCudaGraphConfig(batch_sizes=[1, 8], max_num_token=512, seq_lens=[64], enable_padding=True)
    path.write_text("cuda_graph_config: ~\n")
    assert load(path).model.cuda_graph_config is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ('{"batch_sizes": []}', "PACKHORSE_CUDA_GRAPH_CONFIG.batch_sizes: is an empty list"),
        ('{"sizes": [1]}', "PACKHORSE_CUDA_GRAPH_CONFIG.sizes: is no key of it"),
        (
            json.dumps({"extra_model_inputs": [TYPES.to_dict()]}),
            "PACKHORSE_CUDA_GRAPH_CONFIG.extra_model_inputs: an HTTP request",
        ),
        ("[1]", "PACKHORSE_CUDA_GRAPH_CONFIG: is no JSON object"),
    ],
)
def test_the_environment_is_checked_too(value: str, message: str) -> None:
    with pytest.raises(SettingsError, match="^" + re.escape(message)):
        load_settings(argparse.Namespace(), {"PACKHORSE_CUDA_GRAPH_CONFIG": value})
