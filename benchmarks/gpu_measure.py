"""What ``gpu.py`` runs once for every model: ``python benchmarks/gpu_measure.py PLAN``, the plan of ``gpu_run.py`` as JSON.

A device that is lost takes only its own model's figures along. The result is written after every part, so that a process which
has to be ended leaves what it has.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path

import gpu_systems as systems
import msgspec
import numpy as np
import torch
from gpu_models import build, ids_of, text_maker
from gpu_report import figure
from gpu_rounds import latency, throughput
from gpu_run import Plan, Run, cases_of, lengths_of


def peak_flops(device: str, *, quick: bool) -> list[float]:
    """Operations per second of large bfloat16 matrix products of random values, one figure each."""
    size = 256 if quick else 8192
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    found = []
    for number in range(3 if quick else 13):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(4):
            torch.matmul(a, b)
        synchronize(device)
        if number:  # the first one chooses kernels
            found.append(4 * 2 * size**3 / (time.perf_counter() - began))
    return found


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def free_bytes(device: str) -> int | None:
    """Of the card, as the driver sees it: graphs take memory that torch's allocator does not know."""
    if device == "cpu":
        return None
    gc.collect()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def open_systems(run: Run) -> None:
    """Load all of them; what that costs is part of the result."""
    plan, folder = run.plan, run.model.folder
    cases = cases_of(quick=plan.quick)
    limits = systems.Limits(max(each.batch for each in cases), max(each.batch * each.tokens for each in cases))
    graphs = systems.graph_sizes(lengths_of(quick=plan.quick), [(each.batch, each.tokens) for each in cases])
    run.found |= {"graph_sizes": graphs, "start": {}}
    with run.part("a first load, not counted: it pays for libraries and the device's context"):
        systems.open_packhorse(folder, plan.device, limits, None).close()
    openers: dict[str, Callable[[], systems.System]] = {
        systems.EAGER: lambda: systems.open_packhorse(folder, plan.device, limits, None),
        systems.GRAPHS: lambda: systems.open_packhorse(folder, plan.device, limits, graphs),
        systems.LIBRARY: lambda: systems.open_sentence_transformers(folder, plan.device),
        systems.BY_HAND: lambda: systems.open_transformers(folder, plan.device, is_last_token=run.model.is_causal),
    }
    for name, opener in openers.items():
        with run.part(f"load {name}"):
            before, began = free_bytes(plan.device), time.monotonic()
            run.open[name] = opener()
            seconds, after = time.monotonic() - began, free_bytes(plan.device)
            taken = None if before is None or after is None else before - after
            run.found["start"][name] = {"seconds": figure([seconds]), "device_bytes": taken}


def agreement(run: Run) -> None:
    """Smallest cosine to sentence-transformers, or to what else could be loaded, in company and alone."""
    reference = next((each for each in (systems.LIBRARY, systems.BY_HAND, systems.EAGER) if each in run.open), None)
    if reference is None:
        return
    texts_of = text_maker(run.model.folder)
    short, long = lengths_of(quick=run.plan.quick)
    mixed = [*texts_of(short, 5, 1), *texts_of(long, 2, 2), *texts_of(7, 2, 3)]
    wanted = run.open[reference].from_texts(mixed, 4)
    run.found |= {"cosine_to": reference, "min_cosine": {}}
    for name, each in run.open.items():
        with run.noting(f"vectors of {name}"):
            found = [each.from_texts(mixed, 4), np.concatenate([each.from_texts([text], 1) for text in mixed])]
            if each.from_ids is not None and name != systems.BY_HAND:
                found.append(each.from_ids(ids_of(run.model.folder, mixed), 4))
            run.found["min_cosine"][name] = min(float(systems.cosines(vectors, wanted).min()) for vectors in found)


def main() -> None:
    began = time.monotonic()
    plan = msgspec.json.decode(sys.argv[1], type=Plan)
    model = build(plan.model, Path(plan.into), tiny=plan.quick)
    run = Run(plan, model, began + plan.until_s)
    flops = {tokens: model.flops_per_token(tokens) for tokens in lengths_of(quick=plan.quick)}
    run.found |= {"title": model.title, "linear_parameters": model.linear_parameters, "flops_per_token": flops}
    with run.part("peak of matrix products"):
        run.found["peak_flops"] = figure(peak_flops(plan.device, quick=plan.quick))
    with run.part("load"):
        open_systems(run)
    with run.part("agreement"):
        agreement(run)
    if "latency" in plan.only:
        with run.part("latency"):
            latency(run)
    if "throughput" in plan.only:
        with run.part("throughput"):
            throughput(run)
    for each in run.open.values():
        with contextlib.suppress(Exception):
            each.close()
    run.write()


if __name__ == "__main__":
    main()
