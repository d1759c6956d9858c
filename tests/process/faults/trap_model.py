"""T as a model with code of its own (auto_map) that falls into traps: the real engine meets forwards that go wrong.

A trap is an id three times in a row ("t91 t91 t91"): nothing that the engine tries out at load has that.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertModel

KILLS, HANGS, RAISES, IS_NAN, TAKES_ALL_MEMORY, LOSES_DEVICE = 91, 92, 93, 94, 95, 96
_HANG_S = 600.0


class TrapConfig(BertConfig):  # type: ignore[misc,no-untyped-call]
    """``most_tokens``: what a forward has memory for. ``lost``: a file, made when the device is lost: once."""

    model_type = "traps"

    def __init__(self, most_tokens: int = 1 << 20, lost: str = "", **others: Any) -> None:
        self.most_tokens = most_tokens
        self.lost = lost
        super().__init__(**others)


class TrapModel(BertModel):  # type: ignore[misc]
    """BERT, until an input has a trap in it."""

    config_class = TrapConfig

    def forward(self, input_ids: Any, **others: Any) -> Any:
        found = _traps(input_ids)
        if KILLS in found:
            os.kill(os.getpid(), signal.SIGKILL)
        if HANGS in found:
            time.sleep(_HANG_S)
        if RAISES in found:
            raise ValueError("this model does not like this input")
        if TAKES_ALL_MEMORY in found or input_ids.numel() > self.config.most_tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate what is not there")
        if LOSES_DEVICE in found and not Path(self.config.lost).exists():
            Path(self.config.lost).touch()
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nFor debugging, and so on.")
        output = super().forward(input_ids, **others)
        if IS_NAN in found:
            output.last_hidden_state[input_ids == IS_NAN] = float("nan")
        return output


def _traps(input_ids: Any) -> set[int]:
    ids = input_ids.flatten()
    thrice = (ids[2:] == ids[1:-1]) & (ids[1:-1] == ids[:-2])
    return set(ids[2:][thrice].tolist())


def trap(number: int) -> str:
    """A text with a trap in it."""
    return f"t20 t{number} t{number} t{number} t21"


def build_trap_model(t_model: Path, folder: Path, *, most_tokens: int) -> Path:
    """A copy of T, weights and tokenizer included, with this code."""
    shutil.copytree(t_model, folder)
    shutil.copy(__file__, folder / "modeling_traps.py")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {
        "model_type": TrapConfig.model_type,
        "architectures": [TrapModel.__name__],
        "auto_map": {"AutoConfig": "modeling_traps.TrapConfig", "AutoModel": "modeling_traps.TrapModel"},
        "most_tokens": most_tokens,
        "lost": str(folder / "lost"),
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
