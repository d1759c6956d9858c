"""How fast the engine is on a CPU: ``python benchmarks/engine.py [--repetitions 15] [--threads 2 1] [--out FOLDER]``.

The bundled model (all-MiniLM-L6-v2) through ``packhorse.Encoder``, in float32 and bfloat16, beside sentence-transformers'
``encode`` in float32 with the batch size that turns out best for it here. Both get the same texts and do everything from texts
to vectors. Every number of threads has a process of its own, kept to as many cores; within it the systems take turns, in an
order that moves on, and every repetition has new texts. Prints a table of medians and their ratios; writes ``engine.json``
with every sample and ``engine.png``. About 10 minutes with the defaults; anything else that runs meanwhile spoils it.

The share of the peak: multiplications and additions that the model's linear layers need for the texts' own tokens, padding and
attention not counted, per second, over the most that a linear layer of this model's shapes reaches alone on 512 to 2,048
rows, timed in turn with everything else. The ratio at the peak is what would be left if nothing else took any time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from engine_report import facts_of_machine, plot, print_table

MEASURE = Path(__file__).resolve().parent / "engine_measure.py"


def in_own_process(threads: int, repetitions: int) -> dict[str, Any]:
    """One number of threads, in a process that has this many cores and libraries that were told so before they started."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    if len(cores) < threads:
        raise SystemExit(f"--threads {threads}: this process may use {len(cores)} cores")
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")
    child = subprocess.run(
        [sys.executable, str(MEASURE), str(threads), str(repetitions)],
        env={**os.environ, **dict.fromkeys(names, str(threads)), "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    result: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return result


def main() -> None:
    """Measure, print the table, write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 1])
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    options = parser.parse_args()
    if options.repetitions < 2:
        parser.error(f"--repetitions {options.repetitions}: a median needs at least 2")
    results = [in_own_process(threads, options.repetitions) for threads in options.threads]
    report = {"machine": facts_of_machine(), "repetitions": options.repetitions, "results": results}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "engine.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    print_table(report)
    plot(report, options.out / "engine.png")
    print(f"wrote {options.out / 'engine.json'} and {options.out / 'engine.png'}")


if __name__ == "__main__":
    main()
