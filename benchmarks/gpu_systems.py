"""What ``gpu.py`` compares: Packhorse with and without CUDA graphs, sentence-transformers, and transformers by hand.

All in bfloat16 on the same device, from texts (or token ids) to unit vectors in host memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_models import LONGEST
from numpy.typing import NDArray
from transformers import AutoModel, AutoTokenizer

from packhorse import EncodeCudaGraphConfig, Encoder
from packhorse_shared.messages import EncodeOptions

EAGER, GRAPHS, LIBRARY, BY_HAND = "packhorse eager", "packhorse graphs", "sentence-transformers", "transformers"
Vectors = NDArray[np.float32]
Ids = Sequence[Sequence[int]]


@dataclass(frozen=True)
class System:
    """One of them, loaded. Functions of inputs and of how many of them may share a forward."""

    from_texts: Callable[[list[str], int], Vectors]
    from_ids: Callable[[Ids, int], Vectors] | None
    close: Callable[[], None]


@dataclass(frozen=True)
class Limits:
    """Largest batch of the run."""

    inputs: int
    tokens: int


def graph_sizes(tokens: Sequence[int], batches: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Arguments of an ``EncodeCudaGraphConfig`` whose graphs hold texts of these many ``tokens`` alone and in ``batches``
    of (texts, tokens of each), and some traffic in between."""
    return {
        "batch_sizes": sorted({1, 8, *(count for count, _ in batches)}),
        "num_tokens": sorted({64, LONGEST, 2048, *(count * each for count, each in batches)}),
        "seq_lens": sorted({64, LONGEST, *(each for each in tokens if each > 64)}),
        "enable_padding": True,
    }


def open_packhorse(folder: Path, device: str, limits: Limits, graphs: dict[str, Any] | None) -> System:
    """From texts by ``encode``; from ids as a worker does, two batches under way."""
    config = None if graphs is None else EncodeCudaGraphConfig(**graphs)
    encoder = Encoder(
        folder,
        dtype="bfloat16",
        device=device,
        cuda_graph_config=config,
        max_seq_len=LONGEST,
        max_batch_size=limits.inputs,
        max_num_tokens=limits.tokens,
        show_progress=False,
    )

    def from_texts(texts: list[str], _batch_size: int) -> Vectors:
        found: Vectors = encoder.encode(texts, return_raw_logits=True).numpy()
        return found

    def from_ids(ids: Ids, batch_size: int) -> Vectors:
        words = [np.asarray(each, dtype=np.int32) for each in ids]
        under_way: deque[Callable[[], Any]] = deque()
        rows: list[Vectors] = []
        for start in range(0, len(words), batch_size):
            batch = words[start : start + batch_size]
            under_way.append(encoder.start_batch(batch, [EncodeOptions()] * len(batch)))
            if len(under_way) == 2:
                rows.append(under_way.popleft()().values)
        rows += [finish().values for finish in under_way]
        return np.concatenate(rows).reshape(len(ids), encoder.dimension)

    return System(from_texts, from_ids, encoder.shutdown)


def open_sentence_transformers(folder: Path, device: str) -> System:
    """Its own ``encode``, with the attention that transformers runs by default."""
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415 (a machine without it measures the rest)

    model = SentenceTransformer(
        str(folder), device=device, model_kwargs={"dtype": torch.bfloat16, "attn_implementation": "sdpa"}, local_files_only=True
    )
    model.max_seq_length = LONGEST

    def from_texts(texts: list[str], batch_size: int) -> Vectors:
        return np.asarray(model.encode(texts, batch_size=batch_size, show_progress_bar=False), dtype=np.float32)

    return System(from_texts, None, lambda: None)


def open_transformers(folder: Path, device: str, *, is_last_token: bool) -> System:
    """A loop as people write it: padded batches through ``AutoModel``, pooled and normalized in float32."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.model_max_length = LONGEST
    model: Any = AutoModel.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa").to(device).eval()

    @torch.inference_mode()
    def forward(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        ids, mask = ids.to(device), mask.to(device)
        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
        # Where the last token counts, padding is on the left.
        pooled = hidden[:, -1].float() if is_last_token else _mean(hidden.float(), mask[:, :, None])
        return torch.nn.functional.normalize(pooled, dim=1).cpu()

    def from_texts(texts: list[str], batch_size: int) -> Vectors:
        rows = []
        for start in range(0, len(texts), batch_size):
            made = tokenizer(texts[start : start + batch_size], padding=True, truncation=True, return_tensors="pt")
            rows.append(forward(made["input_ids"], made["attention_mask"]))
        found: Vectors = torch.cat(rows).numpy()
        return found

    def from_ids(ids: Ids, batch_size: int) -> Vectors:
        """For texts of equal length, which is all that is measured."""
        rows = []
        for start in range(0, len(ids), batch_size):
            block = torch.tensor([list(each) for each in ids[start : start + batch_size]])
            rows.append(forward(block, torch.ones_like(block)))
        found: Vectors = torch.cat(rows).numpy()
        return found

    return System(from_texts, from_ids, lambda: None)


def _mean(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (hidden * mask).sum(1) / mask.sum(1)


def cosines(found: Vectors, wanted: Vectors) -> Vectors:
    """Row by row. Vectors normalized in bfloat16 are not quite of length 1."""
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(wanted, axis=1)
    result: Vectors = (found * wanted).sum(1) / lengths
    return result
