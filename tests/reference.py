"""The engine beside its reference: sentence-transformers' own ``encode``, one text at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from packhorse_shared.settings import BatchingSettings, ModelSettings
from packhorse_worker.engine.batch import Input
from packhorse_worker.engine.files.model_folder import read_model_folder
from packhorse_worker.engine.load import Device, load_runner
from packhorse_worker.engine.runner import Runner

CPU = Device(torch.device("cpu"), workers=1)
Vectors = NDArray[np.float32]


def runner_of(folder: Path, *, max_num_tokens: int = 8192, **settings: Any) -> Runner:
    """The engine on a folder, on the CPU."""
    model = ModelSettings(**settings)
    batching = BatchingSettings(max_num_tokens=max_num_tokens)
    return load_runner(read_model_folder(folder, model), folder.name, model, batching, CPU)


def ids_of(folder: Path, texts: Sequence[str]) -> list[NDArray[np.int32]]:
    """Token ids as the folder's tokenizer makes them, neither padded nor cut."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return [np.array(each.ids, dtype=np.int32) for each in tokenizer.encode_batch(list(texts))]


def vectors_of(runner: Runner, ids: Sequence[NDArray[np.int32]], prompt_tokens: int = 0) -> Vectors:
    """The vectors of a batch in which no input fails, shape (inputs, dimension)."""
    outcome = runner.run([Input(each, prompt_tokens) for each in ids])
    assert outcome.failures == []
    vectors = np.stack([np.asarray(row) for row in outcome.rows])
    assert vectors.shape == (len(ids), runner.facts.dimension)
    return vectors


def reference_vectors(folder: Path, texts: Sequence[str], *, prompt: str | None = None) -> Vectors:
    """What sentence-transformers gives, one text at a time."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    return np.stack([model.encode(text, prompt=prompt, show_progress_bar=False) for text in texts])


def texts_up_to(tokens: int, count: int, seed: int = 7) -> list[str]:
    """Texts of words t10 to t127, from one word to ``tokens`` words."""
    random = np.random.default_rng(seed)
    lengths = np.linspace(1, tokens, count).astype(int)
    return [" ".join(f"t{word}" for word in random.integers(10, 128, length)) for length in lengths]
