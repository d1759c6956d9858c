"""Which CUDA graphs are captured, as users say it: ``EncodeCudaGraphConfig`` in Python, ``cuda_graph_config`` in YAML."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, NoReturn, SupportsIndex

from packhorse_shared.errors import SettingsError
from packhorse_shared.extra_inputs import EncodeExtraInputSpec
from packhorse_shared.load import did_you_mean
from packhorse_shared.settings import MAX_TOKENS
from packhorse_shared.values import quoted, whole_number

__all__ = ["EncodeCudaGraphConfig", "EncodeExtraInputSpec", "GraphConfigError", "read_graph_config"]

MAX_SIZES = 256
"""Entries of one list: every combination of the three may become a graph."""
MAX_EXTRA_INPUTS = 32
_SIZE = f"a whole number from 1 to {MAX_TOKENS}"


class GraphConfigError(SettingsError, ValueError):
    """What is wrong with a configuration of CUDA graphs. ``field`` is the key that is to blame, None for the whole."""

    def __init__(self, field: str | None, problem: str, inside: str = "") -> None:
        super().__init__(".".join(part for part in (inside, field) if part) or "cuda_graph_config", problem)
        self.field = field
        self.problem = problem


@dataclass(frozen=True, init=False, repr=False)
class EncodeCudaGraphConfig:
    """Which CUDA graphs an encoder captures at its start. All arguments are optional and given by name.

    A graph is captured for every combination of a batch size, a number of tokens and a longest input that some batch can have.
    ``batch_sizes`` counts inputs, ``num_tokens`` the tokens of all of them together, ``seq_lens`` those of the longest one.
    Each is a list of whole numbers, kept sorted and without doubles. Instead of a list, its largest number alone may be given
    (``max_batch_size``, ``max_num_token``, ``max_seq_len``), and the list is generated up to it; beside a list it must be the
    list's largest. 0 counts as not given. Without either, ``batch_sizes`` goes up to 128; the other two are needed, or no graph
    is captured.

    ``enable_padding``: a batch that has none of these sizes is filled up to the smallest that holds it, instead of being run
    without a graph. ``extra_model_inputs``: the tensors that ``encode`` is given for the model besides ids, each an
    ``EncodeExtraInputSpec`` or a dict of its arguments. ``mode`` is ``"encode"``.

    Raises ValueError that names the argument, its value and what is right.
    """

    batch_sizes: tuple[int, ...] | None
    num_tokens: tuple[int, ...] | None
    seq_lens: tuple[int, ...] | None
    enable_padding: bool
    max_batch_size: int | None
    max_num_token: int | None
    max_seq_len: int | None
    extra_model_inputs: tuple[EncodeExtraInputSpec, ...]
    mode: Literal["encode"]

    def __init__(
        self,
        *,
        batch_sizes: Collection[SupportsIndex] | None = None,
        num_tokens: Collection[SupportsIndex] | None = None,
        seq_lens: Collection[SupportsIndex] | None = None,
        enable_padding: bool = False,
        max_batch_size: int | None = None,
        max_num_token: int | None = None,
        max_seq_len: int | None = None,
        extra_model_inputs: Collection[EncodeExtraInputSpec | Mapping[str, Any]] | None = (),
        mode: Literal["encode"] = "encode",
    ) -> None:
        if not isinstance(enable_padding, bool):
            raise GraphConfigError("enable_padding", f"{quoted(enable_padding)} is not allowed; give true or false")
        if not isinstance(mode, str) or mode != "encode":
            raise GraphConfigError("mode", f"{quoted(mode)} is not allowed; encoders have the mode encode only")
        values = {
            "batch_sizes": _sizes("batch_sizes", batch_sizes),
            "num_tokens": _sizes("num_tokens", num_tokens),
            "seq_lens": _sizes("seq_lens", seq_lens),
            "enable_padding": enable_padding,
            "max_batch_size": _size("max_batch_size", max_batch_size),
            "max_num_token": _size("max_num_token", max_num_token),
            "max_seq_len": _size("max_seq_len", max_seq_len),
            "extra_model_inputs": _specs(extra_model_inputs),
            "mode": mode,
        }
        for largest, sizes in MAXIMA.items():
            _check_agreement(largest, values[largest], sizes, values[sizes])
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        """What was given, as it would be written."""
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self._given().items())})"

    def to_dict(self) -> dict[str, Any]:
        """What was given, as plain values such as JSON has; ``read_graph_config`` makes the same configuration of them."""
        plain: dict[str, Any] = {
            name: list(value) if isinstance(value, tuple) else value for name, value in self._given().items()
        }
        if self.extra_model_inputs:
            plain["extra_model_inputs"] = [spec.to_dict() for spec in self.extra_model_inputs]
        return plain

    def _given(self) -> dict[str, Any]:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if value not in (None, False, (), "encode")}


MAXIMA = {"max_batch_size": "batch_sizes", "max_num_token": "num_tokens", "max_seq_len": "seq_lens"}
"""The field that bounds a generated list, and the list."""
_LONGEST_KEY = 64
_KNOWN = tuple(each.name for each in fields(EncodeCudaGraphConfig))


def read_graph_config(found: Any, inside: str = "cuda_graph_config") -> EncodeCudaGraphConfig:
    """The configuration that a mapping describes, keys as the arguments of ``EncodeCudaGraphConfig``; one that is made stays.

    ``inside`` is put before the names in messages. Raises GraphConfigError, which is a ValueError.
    """
    if isinstance(found, EncodeCudaGraphConfig):
        return found
    holds = f"which holds {', '.join(_KNOWN)}"
    if not isinstance(found, Mapping):
        raise GraphConfigError(None, f"is {quoted(found)}, and must be a mapping, {holds}", inside)
    for key in found:
        if key not in _KNOWN:
            name = key if isinstance(key, str) and len(key) <= _LONGEST_KEY else quoted(key)
            raise GraphConfigError(name, f"is no key of it, {holds}{did_you_mean(name, _KNOWN)}", inside)
    try:
        return EncodeCudaGraphConfig(**{key: value for key, value in found.items() if value is not None})
    except GraphConfigError as problem:
        raise GraphConfigError(problem.field, problem.problem, inside) from None


def refuse_extra_inputs(label: str) -> NoReturn:
    """Refuse a server's configuration that declares ``extra_model_inputs``. ``label`` names where. Raises SettingsError."""
    raise SettingsError(
        label,
        "an HTTP request carries texts or token ids only, so a server cannot feed them; use packhorse.Encoder in Python",
    )


def _sizes(name: str, given: Any) -> tuple[int, ...] | None:
    if given is None:
        return None
    count = _count(given)
    if count is None:
        raise GraphConfigError(name, f"{quoted(given)} is no list; give whole numbers such as [1, 2, 4]")
    if count == 0:
        raise GraphConfigError(name, "is an empty list; leave it out, or give whole numbers such as [1, 2, 4]")
    if count > MAX_SIZES:
        raise GraphConfigError(name, f"has {count} entries, limit {MAX_SIZES}; every combination becomes a graph")
    sizes: set[int] = set()
    for each in given:
        size = whole_number(each)
        if size is None or not 1 <= size <= MAX_TOKENS:
            raise GraphConfigError(name, f"has the entry {quoted(each)}; each must be {_SIZE}")
        sizes.add(size)
    return tuple(sorted(sizes))


def _count(given: Any) -> int | None:
    """How many entries a list has, of whatever kind; None for what is no list, such as an array without dimensions."""
    if not isinstance(given, Collection) or isinstance(given, str | bytes | Mapping):
        return None
    try:
        return len(given)
    except TypeError:
        return None


def _size(name: str, given: Any) -> int | None:
    if given is None:
        return None
    size = whole_number(given)
    if size is None or not 0 <= size <= MAX_TOKENS:
        right = f"give a whole number from 0 to {MAX_TOKENS}; 0 is as if not given"
        raise GraphConfigError(name, f"{quoted(given)} is not allowed; {right}")
    return size or None


def _check_agreement(largest: str, most: Any, sizes: str, entries: Any) -> None:
    if most is not None and entries is not None and most != entries[-1]:
        raise GraphConfigError(
            largest, f"{most} is not the largest of {sizes}, which is {entries[-1]}; make them agree, or leave one of them out"
        )


def _specs(given: Any) -> tuple[EncodeExtraInputSpec, ...]:
    name = "extra_model_inputs"
    if given is None:
        return ()
    if not isinstance(given, list | tuple):
        raise GraphConfigError(name, f"{quoted(given)} is no list; give a list of EncodeExtraInputSpec")
    if len(given) > MAX_EXTRA_INPUTS:
        raise GraphConfigError(name, f"has {len(given)} entries, limit {MAX_EXTRA_INPUTS}")
    specs: list[EncodeExtraInputSpec] = []
    for index, each in enumerate(given):
        try:
            spec = each if isinstance(each, EncodeExtraInputSpec) else EncodeExtraInputSpec.of(each)
        except ValueError as problem:
            raise GraphConfigError(name, f"entry {index}: {problem}") from None
        if any(spec.name == other.name for other in specs):
            raise GraphConfigError(name, f"declares {spec.name} twice; declare it once")
        specs.append(spec)
    return tuple(specs)
