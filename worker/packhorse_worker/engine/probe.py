"""Tries a freshly loaded model out: can its inputs be packed, does padding leave them alone, which row does a classifier read?

No flag of the library tells these things reliably, so they are measured, against inputs run one at a time.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from packhorse_shared.errors import ModelFilesError
from packhorse_worker.engine.attention import attend_within, use_attention, use_packed_attention
from packhorse_worker.engine.batch import Input
from packhorse_worker.engine.forward import Forward, PackedForward, PaddedForward
from packhorse_worker.engine.heads import Gather, SequenceLogits, first_token, last_token_but, mean_of_tokens
from packhorse_worker.engine.packing import layout_of
from packhorse_worker.engine.transformer import first_line

log = logging.getLogger(__name__)

_LENGTHS = (13, 13, 4)
_WIDEST_WINDOW_TRIED = 1024
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}
"""Largest difference that rounding may make, as a share of the largest value. Pad tokens or neighbours that leak make more than
that: most of an input as short as these is its edge."""


@dataclass(frozen=True)
class Manner:
    """How a model's forwards are run."""

    forward: Forward
    pads: bool
    """Whether inputs of different lengths may share a padded forward; True where nothing is padded."""


class Probe:
    """Inputs to try a model with, and what the model makes of each alone."""

    def __init__(self, model: Any, vocabulary_rows: int, max_seq_len: int, pad_id: int, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._exact = PaddedForward(model.base_model, pad_id, device)
        self._rounded = PaddedForward(model.base_model, pad_id, device, longest=max_seq_len)
        longest = [_window(model.config) + 1] if _window(model.config) < _WIDEST_WINDOW_TRIED else []
        self._inputs = [
            Input(_ids(min(length, max_seq_len), shift, vocabulary_rows)) for shift, length in enumerate((*longest, *_LENGTHS))
        ]
        self._layout = layout_of([len(each) for each in self._inputs])
        self._alone: torch.Tensor | None = None

    @torch.inference_mode()
    def find_manner(self, *, may_pack: bool) -> Manner:
        """Packed where that leaves the hidden states alone, else padded, else only equal lengths together.

        Raises ModelFilesError when the model cannot even encode an input alone.
        """
        self._alone = torch.cat([self._run_alone(each) for each in self._inputs])
        if not bool(torch.isfinite(self._alone).all()):
            return Manner(self._rounded, pads=True)  # nothing can be told; every output is checked anyway
        if may_pack and (packed := self._packed()) is not None:
            return Manner(packed, pads=True)
        why = self._difference(self._rounded)
        if why is None:
            return Manner(self._rounded, pads=True)
        log.warning(
            "padding would change this model's outputs, so only inputs of equal length share a forward pass",
            extra={"reason": why},
        )
        return Manner(self._exact, pads=False)

    @torch.inference_mode()
    def find_gather(self, pad_id: int | None) -> Gather:
        """The row that the model's classifier reads: of those tried the one whose logits come closest to the model's own.

        Raises ModelFilesError when none comes close.
        """
        assert self._alone is not None, "find_manner comes first"
        own = torch.cat([self._own_logits(each) for each in self._inputs]).float()
        errors = {}
        for gather in (first_token, last_token_but(pad_id), mean_of_tokens):
            try:
                logits = SequenceLogits(self._model, gather)(self._alone, self._inputs, self._layout)
            except Exception as problem:
                raise ModelFilesError(
                    f"the classifier of a {self._model.config.model_type} cannot be run apart from its transformer: "
                    f"{type(problem).__name__}: {first_line(problem)}"
                ) from problem
            errors[gather] = float((logits - own).abs().max()) if logits.shape == own.shape else float("inf")
        best = min(errors, key=lambda each: errors[each])
        if bool(torch.isfinite(own).all()) and not errors[best] <= _TOLERANCES[self._alone.dtype] * float(own.abs().max()):
            raise ModelFilesError(
                f"the classifier of a {self._model.config.model_type} reads neither the first token, the last nor their mean, "
                "which is not served"
            )
        return best

    def _run_alone(self, each: Input) -> torch.Tensor:
        try:
            return self._exact([each], layout_of([len(each)]), {})
        except Exception as problem:
            dtype = str(self._model.get_input_embeddings().weight.dtype).removeprefix("torch.")
            raise ModelFilesError(
                f"the model cannot encode {len(each)} tokens in {dtype}: {type(problem).__name__}: {first_line(problem)}"
            ) from problem

    def _packed(self) -> PackedForward | None:
        before = use_packed_attention(self._model)
        if before is None:
            log.info("this model computes attention in its own way, so its batches are padded")
            return None
        packed = PackedForward(self._model.base_model, self._device)
        why = self._difference(packed)
        if why is None:
            return packed
        use_attention(self._model, before)
        log.info("this model cannot be packed, so its batches are padded", extra={"reason": why})
        return None

    def _difference(self, forward: Forward) -> str | None:
        """Why a forward of all inputs together is not what they are alone; None where it is."""
        assert self._alone is not None, "find_manner comes first"
        try:
            together = forward(self._inputs, self._layout, {})
        except Exception as problem:
            # Whatever it is, it was not raised one input at a time.
            return f"{type(problem).__name__}: {first_line(problem)}"
        together = together[: self._layout.tokens]
        if together.shape != self._alone.shape:
            return f"shape {tuple(together.shape)} instead of {tuple(self._alone.shape)}"
        difference = float((together - self._alone).abs().max()) / float(self._alone.abs().max())
        if difference <= _TOLERANCES[self._alone.dtype]:
            return None
        return f"hidden states differ by {difference:.2g} of the largest value"

    def _own_logits(self, each: Input) -> torch.Tensor:
        ids = torch.from_numpy(each.ids.astype(np.int64))[None].to(self._device)
        with attend_within(layout_of([len(each)])):  # its attention may have been replaced already
            logits: torch.Tensor = self._model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        return logits


def _window(config: Any) -> int:
    """The sliding window in tokens; a large number where there is none."""
    found = [getattr(config.get_text_config(), name, None) for name in ("sliding_window", "local_attention")]
    return min((each for each in found if isinstance(each, int) and each > 0), default=1 << 30)


def _ids(count: int, shift: int, rows: int) -> Any:
    """Ids from the end of the vocabulary: special tokens stand at its beginning, and models may treat them apart."""
    return ((rows - 1 - shift - np.arange(count)) % rows).astype(np.int32)
