"""Tries a freshly loaded model out: can its inputs be packed, does padding leave them alone, which row does a classifier read?

No flag of the library tells these things reliably, so they are measured, against inputs run one at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from packhorse_shared.errors import ModelFilesError
from packhorse_worker.engine.attention.packed import use_attention, use_packed_attention
from packhorse_worker.engine.attention.way import Way
from packhorse_worker.engine.batch import Input
from packhorse_worker.engine.forward import Forward, PackedForward, PaddedForward
from packhorse_worker.engine.heads import (
    FirstToken,
    Gather,
    LastTokenBut,
    MeanOfTokens,
    SequenceLogits,
    TokenLogits,
    read_off,
)
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

    @property
    def name(self) -> str:
        """In a few words."""
        if isinstance(self.forward, PackedForward):
            return f"packed, attention by {self.forward.way.name}"
        return "padded" if self.pads else "padded, only equal lengths together"


class Probe:
    """Inputs to try a model with, and what the model makes of each alone."""

    def __init__(self, model: Any, vocabulary_rows: int, max_seq_len: int, pad_id: int, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._exact = PaddedForward(model.base_model, pad_id)
        self._rounded = PaddedForward(model.base_model, pad_id, longest=max_seq_len)
        self._windows = {each for each in _windows(model.config) if each < max_seq_len}
        longest = [each + 1 for each in sorted(self._windows) if each < _WIDEST_WINDOW_TRIED]
        lengths = [min(length, max_seq_len) for length in (*longest, *_LENGTHS)]
        ids = [_ids(length, shift, vocabulary_rows) for shift, length in enumerate(lengths)]
        _set_special(ids[-2], model.config, vocabulary_rows)
        self._inputs = [Input(each) for each in ids]
        self._layout = layout_of([len(each) for each in self._inputs])
        self._alone: torch.Tensor | None = None
        self._attention_before: str | None = None
        """What the model's attention was before it was packed."""

    @torch.inference_mode()
    def find_manner(self, ways: Sequence[Way]) -> Manner:
        """Packed where that leaves the hidden states alone, with the first of the ways that does so; else padded, else only
        equal lengths together.

        Raises ModelFilesError when the model cannot even encode an input alone, or each time in another way.
        """
        self._alone = torch.cat([self._run_alone(each) for each in self._inputs])
        if not bool(torch.isfinite(self._alone).all()):
            return Manner(self._rounded, pads=True)  # nothing can be told; every output is checked anyway
        last = self._inputs[-1]
        if _relative(self._run_alone(last), self._alone[-len(last) :]) > _TOLERANCES[self._alone.dtype]:
            raise ModelFilesError(
                f"the model gives another output for the same {len(last)} tokens each time, which is not served"
            )
        if (packed := self._packed(ways)) is not None:
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
        own = self._own_logits()
        errors: dict[Gather, float] = {}
        for gather in (FirstToken(), LastTokenBut(pad_id), MeanOfTokens()):
            logits = self._apart(SequenceLogits(self._model, gather))
            errors[gather] = float((logits - own).abs().max()) if logits.shape == own.shape else float("inf")
        best = min(errors, key=lambda each: errors[each])
        if bool(torch.isfinite(own).all()) and not errors[best] <= _TOLERANCES[self._alone.dtype] * float(own.abs().max()):
            raise ModelFilesError(
                f"the classifier of a {self._model.config.model_type} reads neither the first token, the last nor their mean, "
                "which is not served"
            )
        return best

    @torch.inference_mode()
    def checked(self, readout: TokenLogits) -> TokenLogits:
        """The same. Raises ModelFilesError where a token's logits depend on others' hidden states: inputs would mix."""
        own, logits = self._own_logits(), self._apart(readout)
        most = _TOLERANCES[self._dtype] * float(own.abs().max())
        right = logits.shape == own.shape and float((logits - own).abs().max()) <= most
        if bool(torch.isfinite(own).all()) and not right:
            raise ModelFilesError(
                f"the token classifier of a {self._model.config.model_type} reads more than the token itself, "
                "which is not served"
            )
        return readout

    def check_of(self, forward: Callable[..., torch.Tensor]) -> Callable[[], bool]:
        """A function that tells whether a pipeline's ``forward`` still gives what it gives now."""

        def run() -> list[torch.Tensor]:
            return [forward(self._inputs, per_token=per_token) for per_token in (True, False)]

        def works() -> bool:
            try:
                values = run()
            except Exception as problem:
                log.debug("a model does not run so", extra={"reason": f"{type(problem).__name__}: {first_line(problem)}"})
                return False
            pairs = zip(values, expected, strict=True)
            return all(
                each.shape == right.shape and _relative(each, right) <= _TOLERANCES[self._dtype] for each, right in pairs
            )

        expected = run()
        return works if all(bool(torch.isfinite(each).all()) for each in expected) else lambda: True

    @property
    def _dtype(self) -> torch.dtype:
        assert self._alone is not None, "find_manner comes first"
        return self._alone.dtype

    def _apart(self, readout: SequenceLogits | TokenLogits) -> torch.Tensor:
        """What a head makes of the hidden states of all inputs."""
        assert self._alone is not None, "find_manner comes first"
        try:
            return read_off(readout, self._alone, self._inputs, self._layout)
        except Exception as problem:
            raise ModelFilesError(
                f"the classifier of a {self._model.config.model_type} cannot be run apart from its transformer: "
                f"{type(problem).__name__}: {first_line(problem)}"
            ) from problem

    def _run_alone(self, each: Input) -> torch.Tensor:
        try:
            return self._run(self._exact, [each])
        except Exception as problem:
            dtype = str(self._model.get_input_embeddings().weight.dtype).removeprefix("torch.")
            raise ModelFilesError(
                f"the model cannot encode {len(each)} tokens in {dtype}: {type(problem).__name__}: {first_line(problem)}"
            ) from problem

    def _packed(self, ways: Sequence[Way]) -> PackedForward | None:
        before = use_packed_attention(self._model)
        if before is None:
            log.info("this model cannot be packed: it computes attention in its own way")
            return None
        for way in ways:
            packed = PackedForward(self._model.base_model, way)
            why = self._difference(packed)
            if why is None and self._windows and not packed.windows:
                why = f"inputs longer than {min(self._windows)} tokens are attended to in a way that attention is not told of"
            if why is None:
                self._attention_before = before
                return packed
            log.info("this model cannot be packed: %s", why, extra={"attention": way.name})
        use_attention(self._model, before)
        return None

    def _run(self, forward: Forward, inputs: Sequence[Input]) -> torch.Tensor:
        """The hidden states of inputs in one forward."""
        layout = layout_of([len(each) for each in inputs])
        shape = forward.shape(layout)
        arrays = forward.arrays(inputs, layout, shape)
        return forward({name: torch.from_numpy(each).to(self._device) for name, each in arrays.items()}, layout, shape, {})

    def _difference(self, forward: Forward) -> str | None:
        """Why a forward of all inputs together is not what they are alone; None where it is."""
        assert self._alone is not None, "find_manner comes first"
        try:
            together = self._run(forward, self._inputs)
        except Exception as problem:
            # Whatever it is, it was not raised one input at a time.
            return f"{type(problem).__name__}: {first_line(problem)}"
        together = together[: self._layout.tokens]
        if together.shape != self._alone.shape:
            return f"shape {tuple(together.shape)} instead of {tuple(self._alone.shape)}"
        difference = _relative(together.float(), self._alone.float())
        if difference <= _TOLERANCES[self._alone.dtype]:
            return None
        return f"hidden states differ by {difference:.2g} of the largest value"

    def _own_logits(self) -> torch.Tensor:
        """The model's own logits of each input alone, with its own attention: (inputs, labels), or (tokens, labels)."""
        if self._attention_before is not None:
            use_attention(self._model, self._attention_before)
        ids = [torch.from_numpy(each.ids.astype(np.int64))[None].to(self._device) for each in self._inputs]
        logits = [self._model(input_ids=each, attention_mask=torch.ones_like(each)).logits for each in ids]
        if self._attention_before is not None:
            use_packed_attention(self._model)
        return torch.cat([each.flatten(0, -2) for each in logits]).float()


def _relative(values: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference as a share of the largest value, or the share that half of the dimensions exceed by their own
    largest values: models have dimensions of values so large that beside them no other would count."""
    differences = (values - expected).abs().amax(0)
    largest = expected.abs().amax(0)
    of_each = (differences / largest.clamp(min=1e-12)).median()
    return max(float(differences.max() / largest.max()), float(of_each))


def _windows(config: Any) -> set[int]:
    """Lengths in tokens from which on a model attends to a part of an input only."""
    config = config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds and all(each == "full_attention" for each in kinds):
        return set()
    found = [getattr(config, name, None) for name in ("sliding_window", "local_attention", "attention_chunk_size")]
    return {each for each in found if isinstance(each, int) and each > 0}


def _set_special(ids: NDArray[np.int32], config: Any, rows: int) -> None:
    """Put the ids that models treat apart into an input, behind its first tokens and before its last ones.

    Mask tokens fill what is left: ESM scales embeddings by their share, and a few would change less than bfloat16's rounding.
    """
    found = [
        getattr(config.get_text_config(), f"{name}_token_id", None) for name in ("pad", "mask", "unk", "sep", "bos", "eos")
    ]
    special = [each for each in found if isinstance(each, int) and 0 <= each < rows]
    inner = ids[2:-2]
    inner[: len(special)] = special[: len(inner)]
    mask = getattr(config.get_text_config(), "mask_token_id", None)
    if mask in special:
        inner[len(special) :] = mask


def _ids(count: int, shift: int, rows: int) -> Any:
    """Ids from the end of the vocabulary: special tokens stand at its beginning, and models may treat them apart."""
    return ((rows - 1 - shift - np.arange(count)) % rows).astype(np.int32)
