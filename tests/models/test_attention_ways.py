"""The ways to compute packed attention: padded shapes, what they read, and which of them are used where."""

from __future__ import annotations

import inspect
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import WAYS, WITHOUT_WINDOW, flash_attn_2, in_float32, torch_2_10, torch_2_11, torch_2_13
from packhorse_worker.engine.attention import ways as ways_module
from packhorse_worker.engine.attention.kernels import Kernel, flash_attn_kernel, installed_kernels, torch_kernels
from packhorse_worker.engine.attention.packed import use_packed_attention
from packhorse_worker.engine.attention.rectangle import Rectangle
from packhorse_worker.engine.attention.runs import ByRuns
from packhorse_worker.engine.attention.varlen import Varlen
from packhorse_worker.engine.attention.way import Pattern, Scope, Way
from packhorse_worker.engine.attention.ways import first_that_works, graphable_way, ways_for
from packhorse_worker.engine.batch import Input
from packhorse_worker.engine.forward import PackedForward
from packhorse_worker.engine.packing import Shape, layout_of
from tiny_families import FAMILIES, PADDED, build_family
from tiny_models import ROWS

GRAPHABLE = {name: way for name, way in WAYS.items() if way.is_graphable}
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A batch in a padded shape."""

    lengths: list[int]
    dummies: int
    """Inputs of one token behind them; with the filler full of NaN."""
    slots: int
    """Without an input."""
    filler: int
    """Rows of no input."""
    longer: int
    """Tokens by which an input might be longer."""
    heads: tuple[int, int]
    options: dict[str, Any]


def random_tensors(shape: Shape, heads: int, key_heads: int, size: int = 8) -> list[torch.Tensor]:
    """Query, key and value of unlike scale."""
    random = torch.Generator().manual_seed(7)
    return [torch.randn(1, count, shape.num_tokens, size, generator=random) for count in (heads, key_heads, key_heads)]


def scope_of(way: Way, lengths: list[int], shape: Shape) -> Scope:
    """Without a layout where a graph must do without it."""
    layout = layout_of(lengths)
    arrays = {name: torch.from_numpy(each) for name, each in way.arrays(layout, shape).items()}
    return Scope(way, shape, arrays, None if way.is_graphable else layout)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    return Case(
        lengths=draw(st.lists(st.integers(1, draw(st.sampled_from([1, 3, 24]))), min_size=1, max_size=6)),
        dummies=draw(st.integers(0, 3)),
        slots=draw(st.integers(0, 3)),
        filler=draw(st.integers(0, 9)),
        longer=draw(st.sampled_from([0, 0, 1, 9])),
        heads=draw(st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)])),
        options={
            "causal": draw(st.booleans()),
            "window": draw(st.sampled_from([None, 1, 2, 7, 24, 100])),
            "scale": draw(st.sampled_from([0.05, 8**-0.5, 1.3])),
        },
    )


@settings(max_examples=80)
@given(cases())
@pytest.mark.parametrize("name", GRAPHABLE)
def test_padded_shapes_give_the_same(name: str, case: Case) -> None:
    way, exact = GRAPHABLE[name], ByRuns()
    options = {**case.options, "window": None} if name == WITHOUT_WINDOW else case.options
    real, lengths = sum(case.lengths), case.lengths + [1] * case.dummies
    shape = Shape(sum(lengths) + case.filler, len(lengths) + case.slots, max(lengths) + case.longer)
    q, k, v = random_tensors(shape, *case.heads)
    for each in (q, k, v):
        each[:, :, real:] = float("nan")
    expected = exact.attend((q, k, v), scope_of(exact, lengths, shape), Pattern(**options))
    found = way.attend((q, k, v), scope_of(way, lengths, shape), Pattern(**options))
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert float((found - expected)[:, :real].abs().max()) <= 1e-5


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.lists(st.integers(1, 9), min_size=1, max_size=5))
@pytest.mark.parametrize("name", WAYS)
def test_arrays_differ_in_values_only(name: str, some: list[int], others: list[int]) -> None:
    way = WAYS[name]
    shape = Shape(45, 5, 9)
    arrays, same = (way.arrays(layout_of(each), shape) for each in (some, others))
    assert {name: (each.shape, each.dtype) for name, each in arrays.items()} == {
        name: (each.shape, each.dtype) for name, each in same.items()
    }
    assert all(each.startswith("attention_") for each in arrays)


def test_the_arrays_of_a_padded_shape() -> None:
    layout, shape = layout_of([2, 3]), Shape(num_tokens=7, batch_size=3, seq_len=4)
    kernel = WAYS["torch_2_13"].arrays(layout, shape)
    assert {name: (each.tolist(), each.dtype) for name, each in kernel.items()} == {
        "attention_offsets": ([0, 2, 5, 5], np.dtype(np.int32))
    }
    rectangle = Rectangle().arrays(layout, shape)
    assert {name: each.tolist() for name, each in rectangle.items()} == {
        "attention_cells": [0, 1, 4, 5, 6, 0, 0],
        "attention_corners": [0, 1, 0, 0, 2, 3, 4, 2, 0, 0, 0, 0],
        "attention_lengths": [2, 3, 1],
    }
    assert {each.dtype for each in rectangle.values()} == {np.dtype(np.int64)}


@pytest.mark.parametrize("shape", [Shape(4, 2, 3), Shape(5, 1, 3), Shape(5, 2, 2)])
@pytest.mark.parametrize("name", GRAPHABLE)
def test_a_shape_too_small_is_our_bug(name: str, shape: Shape) -> None:
    with pytest.raises(AssertionError):
        GRAPHABLE[name].arrays(layout_of([2, 3]), shape)


@pytest.mark.parametrize(
    ("sizes", "dtype", "expected"),
    [
        ((12, 12), torch.bfloat16, r"heads of one size, a multiple of 8 up to 256, not 12$"),
        ((264, 264), torch.bfloat16, r"not 264$"),
        ((8, 16), torch.bfloat16, r"not 8, 16$"),
        ((8, 8), torch.float64, r"does not take torch\.float64"),
    ],
)
def test_what_a_kernel_does_not_take_is_refused(sizes: tuple[int, int], dtype: torch.dtype, expected: str) -> None:
    way = WAYS["torch_2_13"]
    query, value = (torch.zeros(1, 2, 4, size, dtype=dtype) for size in sizes)
    with pytest.raises(NotImplementedError, match=expected):
        way.attend((query, query, value), scope_of(way, [4], Shape(4, 1, 4)), Pattern(1.0, causal=False, window=None))


@pytest.mark.parametrize(("before", "behind"), [(0, 0), (8, 16), (3, 0), (8, 3), (3, 5)])
@pytest.mark.parametrize("heads", [1, 2])
def test_a_kernel_gets_heads_that_begin_where_it_may_read(before: int, behind: int, heads: int) -> None:
    """A misaligned address, which ends the CUDA context: the reference kernel refuses it."""
    shape = Shape(5, 2, 3)
    wide = torch.randn(5, before + heads * 8 + behind, generator=torch.Generator().manual_seed(7))
    part = wide[:, before : before + heads * 8].view(5, heads, 8).transpose(0, 1)[None]
    pattern = Pattern(0.3, causal=False, window=None)
    found, exact = (
        way.attend((part, part, part), scope_of(way, [2, 3], shape), pattern) for way in (WAYS["torch_2_13"], ByRuns())
    )
    assert float((found - exact).abs().max()) <= 1e-5


def test_values_of_another_size_than_keys() -> None:
    q, k, v = random_tensors(Shape(5, 2, 3), 2, 2)
    shape = Shape(5, 2, 3)
    found = [
        way.attend((q, k, torch.cat([v, v + 1], -1)), scope_of(way, [2, 3], shape), Pattern(0.3, causal=True, window=None))
        for way in (ByRuns(), Rectangle())
    ]
    assert found[0].shape == (1, 5, 2, 16)
    assert float((found[0] - found[1]).abs().max()) <= 1e-6


class _OnDeviceOnly(TorchDispatchMode):
    """Refuses what a CUDA graph cannot hold: values read back, sizes that depend on values, values from the host."""

    _refused = frozenset({"_local_scalar_dense", "item", "nonzero", "masked_select", "lift_fresh", "equal"})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        kwargs = kwargs or {}
        assert name not in self._refused, f"{name} in a graph"
        if name in {"_to_copy", "copy_"}:
            target = args[0] if name == "copy_" else kwargs.get("device") or args[0]
            source = args[1] if name == "copy_" else args[0]
            assert getattr(target, "device", target) == source.device, "a copy from device to device in a graph"
        if name in {"index", "index_put", "index_put_"}:
            masks = [each for each in args[1] if each is not None and each.dtype == torch.bool]
            assert not masks, "a mask as an index in a graph"
        return func(*args, **kwargs)


def unread(query: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
    """A kernel's place; what the reference does is its own business."""
    return torch.empty_like(query)


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("signature", [torch_2_10, torch_2_11, torch_2_13, flash_attn_2, None])
def test_nothing_is_read_back(signature: Any, window: int | None, *, causal: bool) -> None:
    way: Way = Rectangle() if signature is None else Varlen(in_float32(_with_signature(signature)))
    if signature is torch_2_10:
        window = None
    shape = Shape(7, 3, 4)
    q, k, v = random_tensors(shape, 4, 2)
    scope = scope_of(way, [2, 3], shape)
    with _OnDeviceOnly():
        for _ in range(2):
            found = way.attend((q, k, v), scope, Pattern(0.7, causal, window))
    assert found.shape == (1, 7, 4, 8)


def test_the_watch_sees_what_it_should() -> None:
    values = torch.ones(3)
    for bad in (lambda: values.sum().item(), lambda: values[values > 0], values.nonzero, lambda: torch.tensor([1.0])):
        with pytest.raises(AssertionError, match="in a graph"), _OnDeviceOnly():
            bad()


def _with_signature(function: Any) -> Kernel:
    """A kernel that takes the same and computes nothing."""

    def stand_in(*args: Any, **options: Any) -> torch.Tensor:
        inspect.signature(function).bind(*args, **options)
        return unread(*args)

    stand_in.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return flash_attn_kernel(stand_in) if function is flash_attn_2 else torch_kernels(stand_in)[0]


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["kernel", "rectangle"])
def test_tensors_of_a_gpu_stay_there(name: str, window: int | None, *, causal: bool) -> None:
    """With torch's own kernel as it is installed, on tensors that pretend to be on a GPU."""
    way: Way = Rectangle() if name == "rectangle" else Varlen(torch_kernels(varlen_attn)[0])
    shape = Shape(7, 3, 4)
    arrays = way.arrays(layout_of([2, 3]), shape)
    gpu = torch.device("cuda", 0)
    with FakeTensorMode():
        q, k, v = (torch.empty(1, heads, 7, 8, device=gpu, dtype=torch.bfloat16) for heads in (4, 2, 2))
        tensors = {
            name: torch.empty(each.shape, device=gpu, dtype=getattr(torch, each.dtype.name)) for name, each in arrays.items()
        }
        with _OnDeviceOnly():
            found = way.attend((q, k, v), Scope(way, shape, tensors, None), Pattern(0.7, causal, window))
        assert (found.shape, found.dtype, found.device.type) == ((1, 7, 4, 8), torch.bfloat16, "cuda")


@pytest.mark.parametrize("number", range(len(torch_kernels(varlen_attn))))
@pytest.mark.parametrize("reach", [(-1, -1), (-1, 0), (3, 3), (3, 0)])
def test_the_installed_torch_takes_our_call(number: int, reach: tuple[int, int]) -> None:
    bound: list[inspect.BoundArguments] = []

    def record(*args: Any, **options: Any) -> torch.Tensor:
        bound.append(inspect.signature(varlen_attn).bind(*args, **options))
        return unread(*args)

    record.__signature__ = inspect.signature(varlen_attn)  # type: ignore[attr-defined]
    kernel = torch_kernels(record)[number]
    heads = 2 if kernel.shares_heads else 4
    tensors = (torch.zeros(3, 4, 8), torch.zeros(3, heads, 8), torch.zeros(3, heads, 8))
    if reach[0] == -1 or kernel.takes_window:
        kernel.call(tensors, torch.tensor([0, 3], dtype=torch.int32), 3, reach, 0.5)
        arguments = bound[0].arguments
        assert [arguments[each] for each in ("max_q", "max_k")] == [3, 3]
        assert arguments.get("scale", 0.5) == 0.5
        assert arguments.get("window_size", reach) == reach


@pytest.mark.parametrize(
    ("function", "variants", "takes"),
    [
        (torch_2_10, 1, (False, False, False)),
        (torch_2_11, 1, (True, True, False)),
        (torch_2_13, 4, (True, True, True)),
    ],
)
def test_what_versions_of_torch_take(function: Any, variants: int, takes: tuple[bool, ...]) -> None:
    kernels = torch_kernels(function)
    assert len(kernels) == variants
    assert (kernels[0].takes_window, kernels[0].takes_scale, kernels[0].shares_heads) == takes


def test_an_old_flash_attn_has_no_window() -> None:
    def old(*args: Any, softmax_scale: float, causal: bool) -> torch.Tensor:
        assert (softmax_scale, causal) == (0.5, True)
        return unread(*args)

    kernel = flash_attn_kernel(old)
    assert not kernel.takes_window
    kernel.call((torch.zeros(3, 4, 8),) * 3, torch.tensor([0, 3], dtype=torch.int32), 3, (-1, 0), 0.5)


def test_a_cpu_has_one_way() -> None:
    assert [each.name for each in ways_for(CPU, torch.bfloat16)] == ["SDPA"]
    assert isinstance(graphable_way([ByRuns()]), Rectangle)
    kernel = WAYS["torch_2_13"]
    assert graphable_way([ByRuns(), kernel, Rectangle()]) is kernel


@pytest.mark.parametrize(
    ("capability", "dtype", "expected"),
    [
        ((7, 5), torch.float16, ["SDPA"]),
        ((8, 0), torch.float32, ["SDPA"]),
        ((8, 0), torch.bfloat16, ["torch's varlen attention", "flash-attn", "SDPA"]),
        ((12, 0), torch.float16, ["torch's varlen attention", "flash-attn", "SDPA"]),
    ],
)
def test_ways_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype, expected: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(
        ways_module, "installed_kernels", lambda: [torch_kernels(torch_2_13), [flash_attn_kernel(flash_attn_2)]]
    )
    monkeypatch.setattr(ways_module, "first_that_works", lambda kernels, device, dtype: first_that_works(kernels, CPU, dtype))
    assert [each.name for each in ways_for(torch.device("cuda", 0), dtype)] == expected


def test_torchs_kernel_is_found_where_it_is_installed() -> None:
    assert next(iter(installed_kernels()))[0].name == "torch's varlen attention"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("function", [torch_2_10, torch_2_11, torch_2_13])
def test_a_kernel_that_works_is_used(function: Any, dtype: torch.dtype) -> None:
    assert first_that_works(torch_kernels(function), CPU, dtype) is not None
    assert first_that_works([flash_attn_kernel(flash_attn_2)], CPU, dtype) is not None


def test_arguments_that_a_backend_refuses_are_left_out() -> None:
    asked: list[dict[str, Any]] = []

    def choosy(*args: Any, **options: Any) -> torch.Tensor:
        asked.append(options)
        if "num_splits" in options or options.get("enable_gqa"):
            raise RuntimeError("not supported with this backend")
        return torch_2_13(*args, num_splits=1, **options)

    choosy.__signature__ = inspect.signature(torch_2_13)  # type: ignore[attr-defined]
    way = first_that_works(torch_kernels(choosy), CPU, torch.bfloat16)
    assert way is not None
    assert [sorted(options)[:2] for options in asked[:4]] == [
        ["enable_gqa", "num_splits"],
        ["enable_gqa", "scale"],
        ["num_splits", "scale"],
        ["scale", "window_size"],
    ]


def raising(*args: Any, **options: Any) -> torch.Tensor:
    raise RuntimeError("no kernel image is available for execution on the device\nand much more")


def seeing_one_too_many(*args: Any, window_size: tuple[int, int], **options: Any) -> torch.Tensor:
    wrong = (window_size[0] + 1 if window_size[0] > 0 else -1, window_size[1])
    return torch_2_13(*args, window_size=wrong, **options)


def seeing_what_follows(*args: Any, window_size: tuple[int, int], **options: Any) -> torch.Tensor:
    return torch_2_13(*args, window_size=(-1, -1), **options)


def unscaled(*args: Any, scale: float, **options: Any) -> torch.Tensor:
    return torch_2_13(*args, **options)


def without_bounds(*args: Any, **options: Any) -> torch.Tensor:
    query, key, value, *_ = args
    whole = torch.tensor([0, len(query)], dtype=torch.int32)
    return torch_2_13(query, key, value, whole, whole, len(query), len(query), **options)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (raising, r"RuntimeError: no kernel image is available for execution on the device$"),
        (seeing_one_too_many, r"differs from SDPA by .*, causal False, window 4$"),
        (seeing_what_follows, r"differs from SDPA by .*, causal False, window 4$"),
        (unscaled, r"differs from SDPA by .*, causal False, window None$"),
        (without_bounds, r"differs from SDPA by nan"),
    ],
)
def test_a_kernel_that_does_not_work_is_left_out(function: Any, expected: str, caplog: pytest.LogCaptureFixture) -> None:
    def stand_in(*args: Any, **options: Any) -> torch.Tensor:
        result: torch.Tensor = function(*args, **options)
        return result

    stand_in.__signature__ = inspect.signature(torch_2_13)  # type: ignore[attr-defined]
    with caplog.at_level(logging.INFO, "packhorse_worker"):
        assert first_that_works(torch_kernels(stand_in)[:1], CPU, torch.bfloat16) is None
    (record,) = (each for each in caplog.records if "packhorse" in each.name)
    assert record.__dict__["kernel"] == "torch's varlen attention"
    assert re.search(expected, record.__dict__["reason"])


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in PADDED])
def test_every_family_gives_the_same_in_every_way(tmp_path: Path, name: str) -> None:
    from transformers import AutoModel

    model = AutoModel.from_pretrained(build_family(tmp_path / name, name), dtype=torch.float32).eval()
    assert use_packed_attention(model) is not None
    random = np.random.default_rng(7)
    inputs = [Input(random.integers(10, ROWS, length).astype(np.int32)) for length in (13, 4, 13, 1, 29, 2)]
    lengths = [len(each) for each in inputs]
    tokens = sum(lengths)

    def run(way: Way, dummies: int, shape: Shape) -> torch.Tensor:
        forward = PackedForward(model, way)
        layout = layout_of(lengths + [1] * dummies)
        tensors = {each: torch.from_numpy(array) for each, array in forward.arrays(inputs, layout, shape).items()}
        with torch.inference_mode():
            return forward(tensors, None if way.is_graphable else layout, shape, {})[:tokens]

    exact = run(ByRuns(), 0, Shape(tokens, 6, 29))
    for way in GRAPHABLE.values():
        for dummies, shape in ((0, Shape(tokens, 6, 29)), (3, Shape(tokens + 20, 9, 40))):
            try:
                found = run(way, dummies, shape)
            except NotImplementedError:
                assert way is WAYS[WITHOUT_WINDOW]
                continue
            assert float((found - exact).abs().max()) <= 1e-5
