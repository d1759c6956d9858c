"""Tensors that a model's forward is given besides token ids, as users declare them: ``EncodeExtraInputSpec``. No torch."""

from __future__ import annotations

import keyword
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from packhorse_shared.load import did_you_mean
from packhorse_shared.settings import MAX_TOKENS
from packhorse_shared.values import quoted, whole_number

Symbol = Literal["num_tokens", "batch_size"]
"""A dimension whose size follows from a call: the tokens of all its inputs, or how many inputs they are."""

SYMBOLS: tuple[Symbol, ...] = ("num_tokens", "batch_size")
TYPE_IDS = "token_type_ids"
EMBEDDINGS = "inputs_embeds"

RESERVED_INPUTS = frozenset(
    """
    args attention_mask attn_metadata cache_position encoder_attention_mask encoder_hidden_states input_ids kwargs labels
    logits_to_keep output_attentions output_hidden_states past_key_values position_ids return_context_logits return_dict
    seq_lens use_cache
    """.split()
)
"""Arguments of a forward that the engine sets itself, or that would change the shape of what the model gives back."""
ENCODE_ARGUMENTS = frozenset(
    "self inputs add_special_tokens batch_indexed_model_output copy_logits_to_host return_raw_logits".split()
)
"""Arguments of ``Encoder.encode``, which never reach a model."""

_WHOLE = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_OF_WEIGHTS = ("float16", "bfloat16", "float32")
DTYPES = ("bool", *_WHOLE, *_OF_WEIGHTS, "float64")
_MAX_NAME_CHARACTERS = 128
_MAX_DIMENSIONS = 8
_FIELDS = ("name", "shape", "dtype")


@dataclass(frozen=True, init=False)
class EncodeExtraInputSpec:
    """A tensor that ``encode`` is given by name for the model's forward, besides token ids.

    ``name`` is the forward's argument. ``shape`` has a size for each dimension, and exactly one that follows from the call:
    ``"num_tokens"``, the tokens of all inputs, or ``"batch_size"``, the number of inputs, on any axis. ``dtype`` is the number
    format, as torch names it (``"int64"``, ``"float32"``, ...) or as torch's own object, and is kept as the name:
    ``EncodeExtraInputSpec("token_type_ids", ("num_tokens",), "int64")``.

    Raises ValueError that names the argument, its value and what is right.
    """

    name: str
    shape: tuple[int | Symbol, ...]
    dtype: str

    def __init__(self, name: str, shape: tuple[int | str, ...] | list[int | str], dtype: Any) -> None:
        object.__setattr__(self, "name", _name(name))
        object.__setattr__(self, "shape", _shape(self.name, shape))
        object.__setattr__(self, "dtype", _dtype(self.name, dtype))
        _check_known(self)

    @classmethod
    def of(cls, found: Any) -> EncodeExtraInputSpec:
        """The specification that a mapping of the arguments describes. Raises ValueError."""
        holds = f"give {', '.join(_FIELDS)}"
        if not isinstance(found, Mapping):
            raise ValueError(  # noqa: TRY004 (whatever is wrong with a configuration is a ValueError)
                f"{quoted(found)} is no EncodeExtraInputSpec, nor a mapping; {holds}"
            )
        for key in found:
            if key not in _FIELDS:
                raise ValueError(f"{quoted(key)} is no key of it; {holds}{did_you_mean(str(key)[:64], _FIELDS)}")
        for key in _FIELDS:
            if key not in found:
                raise ValueError(f"{key} is missing; {holds}")
        return cls(**found)

    @property
    def axis(self) -> int:
        """The dimension whose size follows from the call."""
        return next(axis for axis, size in enumerate(self.shape) if isinstance(size, str))

    @property
    def per(self) -> Symbol:
        """What the size of that dimension is."""
        return next(size for size in self.shape if isinstance(size, str))

    def sizes(self, num_tokens: int, batch_size: int) -> tuple[int, ...]:
        """The shape that a call of so many tokens and inputs must give."""
        known = {"num_tokens": num_tokens, "batch_size": batch_size}
        return tuple(known[size] if isinstance(size, str) else size for size in self.shape)

    def handed_dtype(self, floats: str) -> str:
        """The number format in which the forward is handed the tensor. ``floats`` is that of the model's weights.

        The declared one, except for what the engine itself knows: token types are int64, embeddings have the model's.
        """
        return {TYPE_IDS: "int64", EMBEDDINGS: floats}.get(self.name, self.dtype)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values; ``of`` makes the same specification of them."""
        return {"name": self.name, "shape": list(self.shape), "dtype": self.dtype}


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name) or len(name) > _MAX_NAME_CHARACTERS:
        raise ValueError(f"name: {quoted(name)} is not allowed; give an argument of the model's forward by its name")
    if name in RESERVED_INPUTS:
        raise ValueError(f"name: {name} is reserved, as the engine sets it itself; leave it out")
    if name in ENCODE_ARGUMENTS:
        raise ValueError(f"name: {name} is reserved, as it is an argument of encode itself; leave it out")
    return name


def _shape(name: str, shape: Any) -> tuple[int | Symbol, ...]:
    right = 'give a size for each dimension, exactly one of which is "num_tokens" or "batch_size"'
    if not isinstance(shape, list | tuple) or not 1 <= len(shape) <= _MAX_DIMENSIONS:
        raise ValueError(f"shape of {name}: {quoted(shape)} is not allowed; {right} (1 to {_MAX_DIMENSIONS} of them)")
    sizes: tuple[Any, ...] = tuple(size if isinstance(size, str) else _fixed(name, size) for size in shape)
    words = [size for size in sizes if isinstance(size, str)]
    if len(words) != 1 or words[0] not in SYMBOLS:
        raise ValueError(f"shape of {name}: {quoted(sizes)} is not allowed; {right}")
    numbers = math.prod(size for size in sizes if isinstance(size, int))
    if numbers > MAX_TOKENS:
        raise ValueError(f"shape of {name}: {sizes} has {numbers} numbers for each of {words[0]}, limit {MAX_TOKENS}")
    return sizes


def _fixed(name: str, size: Any) -> int:
    found = whole_number(size)
    if found is None or not 1 <= found <= MAX_TOKENS:
        raise ValueError(f"shape of {name}: has {quoted(size)}; a fixed size is a whole number from 1 to {MAX_TOKENS}")
    return found


def _dtype(name: str, dtype: Any) -> str:
    word = dtype if isinstance(dtype, str) else str(dtype) if type(dtype).__name__ == "dtype" else ""
    word = word.removeprefix("torch.")
    if word not in DTYPES:
        raise ValueError(f"dtype of {name}: {quoted(dtype)} is not allowed; give one of {', '.join(DTYPES)}")
    return word


def _check_known(spec: EncodeExtraInputSpec) -> None:
    """What the engine joins itself must be of the kind that it knows."""
    if spec.name == TYPE_IDS and (spec.shape != ("num_tokens",) or spec.dtype not in _WHOLE):
        raise ValueError(f'{TYPE_IDS}: has the shape {spec.shape} and dtype {spec.dtype}; they are ("num_tokens",) and whole')
    if spec.name == EMBEDDINGS and (len(spec.shape) != 2 or spec.shape[0] != "num_tokens" or spec.dtype not in _OF_WEIGHTS):
        raise ValueError(
            f'{EMBEDDINGS}: has the shape {spec.shape} and dtype {spec.dtype}; they are ("num_tokens", width) and float16, '
            "bfloat16 or float32, as weights are"
        )
