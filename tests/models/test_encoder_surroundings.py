"""What the caller's program has switched on in torch changes no vector, and a call that ended in an error keeps nothing."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from packhorse import EncodeError, Encoder
from packhorse_worker.engine import linear
from packhorse_worker.engine.joined import _Joined
from packhorse_worker.engine.surroundings import undisturbed
from tiny_heads import build_head
from tiny_models import HIDDEN, build_t

INPUTS: list[Any] = ["t10 t11", [2, 12, 13, 14, 3], "t15"]
CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "another device": lambda: torch.device("meta"),
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference_mode": torch.inference_mode,
}


@pytest.fixture(scope="module")
def encoder(t_model: Path) -> Iterator[Encoder]:
    with Encoder(t_model) as found:
        yield found


@pytest.mark.parametrize("name", CONTEXTS)
def test_contexts_of_the_caller_change_no_bit(t_model: Path, encoder: Encoder, name: str) -> None:
    expected = encoder.encode(INPUTS, return_raw_logits=True)
    types = torch.zeros(12, dtype=torch.int64)
    with CONTEXTS[name]():
        found = encoder.encode(INPUTS, return_raw_logits=True)
        typed = encoder.encode(INPUTS, return_raw_logits=True, token_type_ids=types)
        with Encoder(t_model) as made_within:
            made = made_within.encode(INPUTS, return_raw_logits=True)
    assert all(torch.equal(each, expected) for each in (found, typed, made))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_the_callers_default_number_format_changes_no_bit(t_model: Path, encoder: Encoder, dtype: torch.dtype) -> None:
    expected = encoder.encode(INPUTS, return_raw_logits=True)
    torch.set_default_dtype(dtype)
    try:
        found = encoder.encode(INPUTS, return_raw_logits=True)
        with Encoder(t_model) as made_within:
            made = made_within.encode(INPUTS, return_raw_logits=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype == made.dtype == torch.float32
    assert torch.equal(found, expected)
    assert torch.equal(made, expected)


def test_shorter_products_that_the_caller_allows_change_no_bit(t_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's own linear layers, which look at that switch on processors that multiply bfloat16."""
    monkeypatch.setattr(linear, "_is_faster", lambda *_: False)
    with Encoder(t_model) as encoder:
        expected = encoder.encode(INPUTS, return_raw_logits=True)
        torch.set_float32_matmul_precision("medium")
        try:
            found = encoder.encode(INPUTS, return_raw_logits=True)
            assert torch.get_float32_matmul_precision() == "medium"
        finally:
            torch.set_float32_matmul_precision("highest")
    assert torch.equal(found, expected)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_formats_of_products_are_ours_and_then_the_callers_again(device: str) -> None:
    """On CUDA convolutions in TF32 and cuDNN's attention are what torch has by itself; a server's workers have neither."""
    backends: Any = torch.backends
    convolutions = backends.mkldnn.conv if device == "cpu" else backends.cudnn.conv
    products = backends.mkldnn.matmul if device == "cpu" else backends.cuda.matmul

    def switches() -> tuple[str, str]:
        return convolutions.fp32_precision, products.fp32_precision

    before = switches()
    convolutions.fp32_precision = products.fp32_precision = "tf32"
    has_cudnn = backends.cuda.cudnn_sdp_enabled()
    try:
        with undisturbed(device), undisturbed(device):
            assert switches() == ("ieee", "ieee")
            assert backends.cuda.cudnn_sdp_enabled() == (has_cudnn and device == "cpu")
        assert switches() == ("tf32", "tf32")
        assert backends.cuda.cudnn_sdp_enabled() == has_cudnn
    finally:
        convolutions.fp32_precision, products.fp32_precision = before


TYPES = {
    "list": ([0, 1], "token_type_ids is a list; give a torch tensor or a numpy array with a row for each token"),
    "floats": (torch.zeros(2), "token_type_ids holds float32; types are integers"),
    "nan": (torch.tensor([torch.nan, 0]), "token_type_ids holds float32; types are integers"),
    "complex": (torch.zeros(2, dtype=torch.complex64), "token_type_ids holds complex64, which no model takes"),
    "two dimensions": (torch.zeros(2, 2, dtype=torch.int64), r"token_type_ids has the shape \(2, 2\); give one type"),
    "texts": (np.array(["a", "b"]), "token_type_ids holds <U1, which no model takes"),
    "objects": (np.array([None, 1]), "token_type_ids holds object, which no model takes"),
    "sparse": (torch.zeros(2, dtype=torch.int64).to_sparse(), "token_type_ids is a sparse_coo tensor; give a plain one"),
    "meta": (torch.zeros(2, dtype=torch.int64, device="meta"), "token_type_ids is on the device meta, which holds no values"),
}


@pytest.mark.parametrize("name", TYPES)
def test_tensors_that_mean_nothing(encoder: Encoder, name: str) -> None:
    value, message = TYPES[name]
    with pytest.raises(ValueError, match=f"^{message}"):
        encoder.encode([10, 11], token_type_ids=value)


@pytest.mark.parametrize("value", [[[0.0] * HIDDEN] * 2, torch.zeros(2, HIDDEN, dtype=torch.int64)], ids=["list", "integers"])
def test_embeddings_that_mean_nothing(encoder: Encoder, value: Any) -> None:
    with pytest.raises(ValueError, match=r"^inputs_embeds "):
        encoder.encode([10, 11], inputs_embeds=value)


@pytest.mark.parametrize(
    "types",
    [
        np.array([1, 0])[::-1],
        np.array([0, 1], dtype=np.uint16),
        np.array([0, 1], dtype=">i4"),
        np.array([False, True]),
        torch.tensor([0, 1], dtype=torch.uint16),
    ],
    ids=["reversed", "uint16", "big-endian", "bool", "torch uint16"],
)
def test_arrays_of_any_kind_of_integer(encoder: Encoder, types: Any) -> None:
    expected = encoder.encode([10, 11], token_type_ids=torch.tensor([0, 1]))
    assert torch.equal(encoder.encode([10, 11], token_type_ids=types).logits, expected.logits)


def test_a_read_only_array_is_taken_without_a_warning(encoder: Encoder) -> None:
    types = np.array([0, 1])
    types.flags.writeable = False
    encoder.encode([10, 11], token_type_ids=types)


def test_an_argument_that_is_none_is_not_given(encoder: Encoder) -> None:
    expected = encoder.encode([10, 11])
    found = encoder.encode([10, 11], token_type_ids=None, inputs_embeds=None)
    assert torch.equal(found.logits, expected.logits)


@pytest.mark.parametrize(("value", "shown"), [("no", "'no'"), (np.True_, r"np\.True_"), (1, "1"), (None, "None")], ids=str)
@pytest.mark.parametrize("name", ["batch_indexed_model_output", "copy_logits_to_host", "return_raw_logits"])
def test_switches_are_true_or_false(encoder: Encoder, name: str, value: Any, shown: str) -> None:
    arguments: dict[str, Any] = {name: value}
    with pytest.raises(TypeError, match=f"^{name}: {shown} is not allowed; give True or False$"):
        encoder.encode("t10", **arguments)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_error_in_the_middle_of_a_forward_leaves_nothing_behind(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "_is_faster", lambda *_: True)
        encoder = Encoder(build_t(tmp_path))
    expected = encoder.encode("t10")
    seen: list[weakref.ref[torch.Tensor]] = []
    part = _Joined.part

    def fail(joined: _Joined, values: torch.Tensor, index: int) -> torch.Tensor:
        part(joined, values, index)
        seen.append(weakref.ref(values))
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Joined, "part", fail)
        with pytest.raises(error if error is KeyboardInterrupt else EncodeError):
            encoder.encode("t10 t11 t12")
    assert len(seen) == 1
    gc.collect()
    assert [each() for each in seen] == [None]
    assert torch.equal(encoder.encode("t10").logits, expected.logits)


def test_a_head_that_raises_keeps_no_hidden_states(tmp_path: Path) -> None:
    with Encoder(build_head(tmp_path, "bert-classifier")) as encoder:
        assert encoder._runner is not None
        head: Any = encoder._runner.pipeline._readout._head  # type: ignore[attr-defined]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(head._model, "forward", _raise)
            with pytest.raises(EncodeError):
                encoder.encode("t10")
        assert head._stand_in.hidden is None


def _raise(*_: Any, **__: Any) -> None:
    raise RuntimeError


def test_a_fork_is_told_instead_of_waiting_for_threads_that_are_not_there(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: process + 1)
    with pytest.raises(RuntimeError, match=f"made in process {process} and does not live through a fork"):
        encoder.encode("t10")


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_encoder_is_not_copied(encoder: Encoder, duplicate: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match="an encoder cannot be copied or pickled; make one in each process that uses it"):
        duplicate(encoder)
