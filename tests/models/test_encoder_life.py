"""``Encoder`` as an object: its arguments, its properties, threads, progress, shutdown, and its name for TensorRT-LLM users."""

from __future__ import annotations

import gc
import io
import logging
import re
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.utils import logging as transformers_logging

from packhorse import LLM, EncodeCudaGraphConfig, Encoder, ModelFilesError
from packhorse_shared.cores import usable_cores
from packhorse_worker.engine import progress
from packhorse_worker.engine.api import opening
from packhorse_worker.engine.api.arguments import find_device
from tiny_models import HIDDEN, build_t


@pytest.fixture(scope="module")
def encoder(t_model: Path) -> Iterator[Encoder]:
    with Encoder(t_model) as found:
        yield found


def test_properties(encoder: Encoder) -> None:
    assert (encoder.dimension, encoder.max_seq_len, encoder.task, encoder.labels) == (HIDDEN, 64, "embedding", ())
    assert (encoder.dtype, encoder.device) == (torch.float32, torch.device("cpu"))
    assert isinstance(encoder.activation, torch.nn.Identity)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "int8"}, "dtype: 'int8' is not allowed; give auto, bfloat16, float16 or float32"),
        ({"dtype": torch.int8}, "dtype: 'int8' is not allowed"),
        ({"dtype": "float16"}, "dtype: float16 needs a GPU"),
        ({"pooling": "median"}, "pooling: 'median' is not allowed; give cls, lasttoken, max"),
        ({"normalize": "yes"}, "normalize: 'yes' is not allowed; give true or false"),
        ({"max_seq_len": 0}, "max_seq_len: 0 is not allowed; give a whole number from 1"),
        ({"max_seq_len": 65}, "max_seq_len: 65 is more than this model takes"),
        ({"max_seq_len": True}, "max_seq_len: True is not allowed"),
        ({"max_num_tokens": "much"}, "max_num_tokens: 'much' is not allowed"),
        ({"max_batch_size": 0}, "max_batch_size: 0 is not allowed"),
        ({"revision": ""}, "revision: '' is not allowed"),
        ({"trust_remote_code": 1}, "trust_remote_code: 1 is not allowed"),
        ({"model": 5}, "model: 5 is not allowed; give a text"),
        ({"model": ""}, "model is empty; leave it out"),
        ({"model": ["x" * 5000]}, r"model: .{1,80} is not allowed; give a text$"),
        *(
            ({"show_progress": value}, rf"^show_progress: {re.escape(repr(value))} is not allowed; give True, False or None$")
            for value in ("true", 1, 0, "", np.True_)
        ),
        ({"max_batch_size": np.True_}, r"max_batch_size: np\.True_ is not allowed"),
        ({"max_batch_size": torch.tensor(True)}, r"max_batch_size: tensor\(True\) is not allowed"),
        ({"max_batch_size": np.int64(0)}, r"max_batch_size: .*0.* is not allowed"),
        ({"trust_remote_code": np.int64(1)}, r"trust_remote_code: .*1.* is not allowed"),
        ({"device": "x" * 500}, r"^device: 'x{9,20}\.\.\.x{9,20}' is not allowed"),
        ({"device": "meta:" + "1" * 500}, "^device: .{1,80}; give auto"),
        ({"dtype": "x" * 500}, r"^dtype: 'x{9,20}\.\.\.x{9,20}' is not allowed"),
        ({"device": "gpu"}, "device: 'gpu' is not allowed; give auto, cpu, cuda, or cuda:1"),
        ({"device": "mps"}, "device: mps is not supported"),
        ({"device": None}, "device: None is not allowed"),
        ({"cuda_graph_config": {"batch_size": [1]}}, r"cuda_graph_config\.batch_size: .*did you mean batch_sizes\?"),
        ({"cuda_graph_config": [1]}, r"cuda_graph_config: is \[1\], and must be a mapping, which holds batch_sizes"),
        ({"cuda_graph_config": {"seq_lens": []}}, r"cuda_graph_config\.seq_lens: is an empty list"),
    ],
    ids=str,
)
def test_an_argument_that_cannot_be_used_is_named(t_model: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        Encoder(**{"model": t_model, **arguments})
    assert "\n" not in str(caught.value)


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device("auto") == torch.device("cpu")
    assert find_device(torch.device("cpu")) == torch.device("cpu")
    with pytest.raises(ValueError, match="device: cuda:1 was asked for, but torch finds no CUDA device; give cpu or auto"):
        find_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert [find_device(each) for each in ("auto", "cuda", "cuda:0")] == [torch.device("cuda", index) for index in (1, 1, 0)]
    with pytest.raises(ValueError, match="device: there is no cuda:2; torch finds 2 CUDA devices"):
        find_device("cuda:2")


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match="there is no folder"):
        Encoder(tmp_path / "nowhere")
    with pytest.raises(ModelFilesError, match=r"config\.json is missing"):
        Encoder(tmp_path)


@pytest.mark.parametrize("name", ["x" * 5000, "/" + "x" * 5000, "/a" * 2500, "a/" + "x" * 300], ids=lambda name: name[:3])
def test_a_model_with_a_name_too_long_for_any_is_one_short_line(name: str) -> None:
    with pytest.raises(ModelFilesError, match=r"^model: .*\.\.\.") as caught:
        Encoder(name)
    assert len(str(caught.value)) < 700
    assert "\n" not in str(caught.value)


def test_a_model_in_the_home_of_nobody() -> None:
    with pytest.raises(ModelFilesError, match="model: there is no folder ~nobody-of-this-name/model"):
        Encoder("~nobody-of-this-name/model")


def test_whole_numbers_may_be_numpys(t_model: Path) -> None:
    numbers: dict[str, Any] = {"max_batch_size": np.int64(3), "max_num_tokens": np.uint16(96), "max_seq_len": np.int32(20)}
    with Encoder(t_model, **numbers) as encoder:
        assert (encoder.limits.max_batch_size, encoder.limits.max_num_tokens, encoder.max_seq_len) == (3, 96, 20)


def test_settings_reach_the_model(t_model: Path) -> None:
    with Encoder(str(t_model), pooling="cls", normalize=False, dtype=torch.bfloat16, max_seq_len=10) as encoder:
        vector = encoder.encode("t10").logits
        tokens = encoder.encode("t10", batch_indexed_model_output=False).logits
        assert (encoder.dtype, encoder.max_seq_len) == (torch.bfloat16, 10)
    assert vector.dtype == torch.float32
    assert torch.equal(vector, tokens[0])


MANY = {"batch_sizes": range(1, 129), "num_tokens": range(1, 257), "seq_lens": range(1, 65)}


@pytest.mark.parametrize(
    "config", [{"batch_sizes": [1, 8]}, EncodeCudaGraphConfig(batch_sizes=[1, 8]), MANY], ids=["dict", "object", "many"]
)
def test_graphs_have_no_effect_on_a_cpu_and_say_so_once(t_model: Path, caplog: pytest.LogCaptureFixture, config: Any) -> None:
    with caplog.at_level(logging.WARNING), LLM(t_model, encode_only=True, device="cpu", cuda_graph_config=config):
        pass
    assert [each.getMessage().partition(":")[0] for each in caplog.records if "packhorse" in each.name] == [
        "cuda_graph_config has no effect on a CPU"
    ]


@pytest.mark.parametrize("threads", [usable_cores() + 3, 1])
def test_threads_of_torch_are_bounded_and_else_left_alone(t_model: Path, threads: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        Encoder(t_model).shutdown()
        assert torch.get_num_threads() == min(threads, usable_cores())
    finally:
        torch.set_num_threads(before)


def test_the_callers_logging_is_left_alone(t_model: Path) -> None:
    before, had_bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    try:
        transformers_logging.set_verbosity_info()
        transformers_logging.enable_progress_bar()
        Encoder(t_model).shutdown()
        assert transformers_logging.get_verbosity() == transformers_logging.INFO
        assert transformers_logging.is_progress_bar_enabled()
    finally:
        transformers_logging.set_verbosity(before)
        if not had_bars:
            transformers_logging.disable_progress_bar()


def test_shutdown_frees_the_model(tmp_path: Path) -> None:
    with Encoder(build_t(tmp_path)) as encoder:
        assert encoder._runner is not None
        pipeline = weakref.ref(encoder._runner.pipeline)
        kept = encoder.encode("t10")
    gc.collect()
    assert pipeline() is None
    assert kept.logits.shape == (HIDDEN,)
    assert (encoder.dimension, encoder.memory_bytes()) == (HIDDEN, None)
    encoder.shutdown()
    for inputs in ("t10", [], ["t10"]):
        with pytest.raises(RuntimeError, match="shut down"):
            encoder.encode(inputs)
    with pytest.raises(RuntimeError, match="shut down"):
        encoder.start_batch([], [])()


def test_several_threads_share_an_encoder(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = encoder._runner
    assert runner is not None
    run, inside, met = runner.run, threading.Lock(), []

    def watched(*arguments: Any, **options: Any) -> Any:
        met.append(inside.acquire(blocking=False))
        try:
            return run(*arguments, **options)
        finally:
            inside.release()

    monkeypatch.setattr(runner, "run", watched)
    texts = [[f"t{10 + thread} t{20 + number}" for number in range(30)] for thread in range(4)]
    with ThreadPoolExecutor(4) as executor:
        found = list(executor.map(encoder.encode, texts))
    assert met == [True] * 4, "one call at a time is in the model"
    for asked, outputs in zip(texts, found, strict=True):
        assert [each.prompt for each in outputs] == asked
        for each in outputs[::10]:
            torch.testing.assert_close(each.logits, encoder.encode(each.prompt_token_ids).logits, rtol=0, atol=1e-5)


def test_a_shutdown_waits_for_the_call_that_runs(t_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = Encoder(t_model)
    runner = encoder._runner
    assert runner is not None
    run, running, go_on = runner.run, threading.Event(), threading.Event()

    def slow(*arguments: Any, **options: Any) -> Any:
        running.set()
        assert go_on.wait(10)
        return run(*arguments, **options)

    monkeypatch.setattr(runner, "run", slow)
    with ThreadPoolExecutor(2) as executor:
        encoded = executor.submit(encoder.encode, "t10")
        assert running.wait(10)
        closed = executor.submit(encoder.shutdown)
        go_on.set()
        assert encoded.result(10).logits.shape == (HIDDEN,)
        closed.result(10)
    with pytest.raises(RuntimeError, match="shut down"):
        encoder.encode("t10")


def test_many_texts_are_tokenized_by_no_more_threads_than_torch_has(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    class Executor(ThreadPoolExecutor):
        def __init__(self, threads: int, name: str) -> None:
            seen.append(threads)
            super().__init__(threads, name)

    monkeypatch.setattr("packhorse_worker.engine.api.texts.ThreadPoolExecutor", Executor)
    texts = [f"t{10 + number % 100} " + " " * 1000 for number in range(100)]
    expected = [[2, 10 + number % 100, 3] for number in range(100)]
    for threads, used in ((1, []), (2, [2])):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert [each.prompt_token_ids for each in encoder.encode(texts)] == expected
        assert seen == used


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("asked", "inputs", "stream", "bar"),
    [
        (None, 3, Terminal(), "3/3"),
        (None, 2, Terminal(), ""),
        (None, 3, io.StringIO(), ""),
        (True, 1, io.StringIO(), "1/1"),
        (False, 3, Terminal(), ""),
    ],
)
def test_a_bar_for_long_lists_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, asked: bool | None, inputs: int, stream: io.StringIO, bar: str
) -> None:
    monkeypatch.setattr("sys.stderr", stream)
    with progress.progress_bar("encoding", inputs, asked, many=3) as advance:
        for _ in range(inputs if bar else 0):
            assert advance is not None
            advance(1)
        assert (advance is None) is not bool(bar)
    assert bar in stream.getvalue()
    assert bool(stream.getvalue()) is bool(bar)


def test_the_bar_is_told_of_every_batch(t_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    with Encoder(t_model, show_progress=True, max_batch_size=2) as encoder:
        monkeypatch.setattr("sys.stderr", stream)
        encoder.encode(["t10", "t11", "t12"])
    assert "3/3" in stream.getvalue()


def test_what_a_worker_makes_loads_no_tokenizer(t_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    from packhorse_shared.messages import EncodeOptions
    from packhorse_shared.settings import BatchingSettings, ModelSettings
    from packhorse_worker.engine.files.model_folder import read_model_folder
    from reference import CPU

    settings = ModelSettings(model=str(t_model))
    folder = read_model_folder(t_model, settings)
    encoder = Encoder.from_settings(folder, "t", settings, BatchingSettings(), CPU)
    monkeypatch.setattr("packhorse_worker.engine.api.texts.read_tokenizer", lambda _: pytest.fail("the tokenizer was loaded"))
    batch = encoder.start_batch([np.array(ids, dtype=np.int32) for ids in ([2, 10, 3], [999])], [EncodeOptions()] * 2)()
    assert (batch.row_values, [each.index for each in batch.failures]) == ([HIDDEN, 0], [1])
    assert torch.equal(torch.from_numpy(batch.values), encoder.encode([2, 10, 3]).logits)
    encoder.shutdown()


def test_the_name_that_tensorrt_llm_users_know(t_model: Path) -> None:
    for arguments in ({}, {"encode_only": False}, {"encode_only": 1}):
        with pytest.raises(ValueError, match="encode_only=True"):
            LLM(t_model, **arguments)
    with LLM(model=t_model, encode_only=True, max_batch_size=4) as llm:
        assert isinstance(llm, Encoder)
        assert llm.limits.max_batch_size == 4
        assert llm.encode("t10").logits.shape == (HIDDEN,)
        for call in (llm.generate, llm.generate_async):
            with pytest.raises(RuntimeError, match="encode_only"):
                call(["t10"], sampling_params=None)
    with pytest.raises(RuntimeError, match="shut down"):
        llm.encode("t10")


def test_settings_errors_are_value_errors_of_one_line(t_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from packhorse_shared.errors import SettingsError

    def refuse(*_: Any, **__: Any) -> Any:
        raise SettingsError("normalize", "cannot be used")

    monkeypatch.setattr(opening, "load_runner", refuse)
    with pytest.raises(ValueError, match=r"^normalize: cannot be used$"):
        Encoder(t_model)
