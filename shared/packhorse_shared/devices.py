"""Which devices there are, as words for CUDA_VISIBLE_DEVICES. The words are opaque: indexes, GPU UUIDs and MIG UUIDs alike.

Each worker gets one word. What the words mean is CUDA's to say; only where the driver can be asked (``nvml.py``) is a word
refused that names nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from packhorse_shared.errors import SettingsError
from packhorse_shared.nvml import Inventory, read_inventory
from packhorse_shared.settings import MAX_PROCESSES

AUTO = "auto"
CPU = "cpu"
VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
BUS_ORDER = "PCI_BUS_ID"
"""The order in which nvidia-smi and NVML count. CUDA's own default puts the fastest card first."""

_SETTING = "devices"
_LONGEST_WORD = 256
_LONGEST_QUOTE = 64
_MOST_LISTED = 16
"""So much of a word, and so many UUIDs, are shown in one line."""
_NOTHING = ("none", "void", "nodevfiles")
"""Words by which container runtimes and batch systems say that there is no GPU (Slurm: NoDevFiles)."""
_TORCH_NAME = re.compile(r"(?:cuda|gpu)(?::(\d+))?", re.ASCII | re.IGNORECASE)
_NEGATIVE = re.compile(r"-\d+", re.ASCII)
_CUDA_WORD = re.compile(r"\d+|GPU-[0-9A-Za-z-]+|MIG-[0-9A-Za-z/-]+", re.ASCII)
_RANGE = re.compile(r"\d+(?:-|\.\.)\d+", re.ASCII)
_SLICE = re.compile(r"\d+:\d+", re.ASCII)
_CPU_NUMBER = re.compile(r"cpu:\d+", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class Remark:
    """A line for the log of whoever starts the workers."""

    text: str
    is_warning: bool


@dataclass(frozen=True)
class Devices:
    """What the settings mean on this machine."""

    words: tuple[str, ...]
    """One for each device: ``("cpu",)``, or what its workers' CUDA_VISIBLE_DEVICES is set to."""
    remarks: tuple[Remark, ...] = ()
    uuids: tuple[str, ...] = ()
    """The UUID of each word where the words are indexes that nobody gave, else empty. CUDA gets it instead of the word: an
    index means another card once a card before it is lost, and people know cards by their index."""


def checked_words(devices: Sequence[str]) -> tuple[str, ...]:
    """The words of ``--devices``, stripped. Raises SettingsError for what is wrong on every machine. Asks no driver."""
    words = tuple(word.strip() for word in devices)
    if not any(words):
        raise SettingsError(_SETTING, "is empty; say auto, cpu, or a list such as 0,1")
    if not all(words):
        raise SettingsError(
            _SETTING, f"{_quote(','.join(words))} has an empty entry; leave it out, or write the device that is missing"
        )
    if len(words) > 1 and {AUTO, CPU} & set(words):
        raise SettingsError(_SETTING, f"auto and cpu stand alone, not in a list ({_short(','.join(words))})")
    if words not in ((AUTO,), (CPU,)):
        _check_words(_SETTING, words)
    return words


def find_devices(devices: Sequence[str], environ: Mapping[str, str]) -> Devices:
    """What ``--devices`` means here; ``environ`` has CUDA's own variables.

    ``auto`` is what CUDA would see: the entries of CUDA_VISIBLE_DEVICES where it is set, else every GPU (of a card in MIG
    mode, its slices) that the driver lists, else the CPU. A list says what it says whatever CUDA_VISIBLE_DEVICES is. Raises
    SettingsError for a word that names no device. Makes no CUDA context; for ``cpu`` the driver is not even asked.
    """
    words = checked_words(devices)
    visible = environ.get(VISIBLE)
    if words == (CPU,):
        return Devices(words)
    if words != (AUTO,):
        _check_exist(_SETTING, words, read_inventory(), environ)
        return Devices(words, _beyond(words, visible))
    if visible is None:
        return _all_there_is(read_inventory(), environ)
    words, hidden = _as_cuda_reads(visible)
    if not words:
        return Devices((CPU,), (_on_cpu(f"{VISIBLE}={_short(visible)} hides every GPU", is_warning=False),))
    _check_words(VISIBLE, words)
    _check_exist(VISIBLE, words, read_inventory(), environ)
    return Devices(words, hidden)


def _as_cuda_reads(visible: str) -> tuple[tuple[str, ...], tuple[Remark, ...]]:
    """The entries of CUDA_VISIBLE_DEVICES up to the first that is no device: CUDA hides what follows it.

    Source: NVIDIA, "CUDA Programming Guide", CUDA environment variables.
    """
    entries = [entry.strip() for entry in visible.split(",")]
    end = next((at for at, entry in enumerate(entries) if _says_nothing(entry)), len(entries))
    behind = [entry for entry in entries[end + 1 :] if not _says_nothing(entry)]
    if not behind:
        return tuple(entries[:end]), ()
    hiding = f"CUDA hides what stands behind {_short(entries[end]) or 'an empty entry'}"
    remark = Remark(f"{VISIBLE}={_short(visible)}: {hiding}, so {_short(','.join(behind))} is not used", is_warning=True)
    return tuple(entries[:end]), (remark,)


def _says_nothing(entry: str) -> bool:
    return not entry or entry.lower() in _NOTHING or _NEGATIVE.fullmatch(entry) is not None


def _check_words(name: str, words: Sequence[str]) -> None:
    if len(words) > MAX_PROCESSES:
        raise SettingsError(name, f"names {len(words)} devices, limit {MAX_PROCESSES}: so many workers can run on one machine")
    for word in words:
        if (problem := _problem_of(word)) is not None:
            raise SettingsError(name, problem)
    if len(set(words)) != len(words):
        raise SettingsError(
            name, f"a device is named twice ({_short(','.join(words))}); use --workers_per_device for more workers"
        )
    seen: dict[str, str] = {}
    for word in words:
        same = (word.lstrip("0") or "0") if word.isdecimal() else word.lower()
        if (other := seen.get(same)) is not None:
            raise _named_twice(name, other, word)
        seen[same] = word


def _named_twice(name: str, word: str, other: str) -> SettingsError:
    return SettingsError(
        name, f"{_short(word)} and {_short(other)} are the same device; use --workers_per_device for more workers"
    )


def _problem_of(word: str) -> str | None:
    """What keeps a word from ever being a device, on any machine; None where it may be one."""
    if len(word) > _LONGEST_WORD:
        advice = f": it has {len(word)} characters, limit {_LONGEST_WORD}"
    elif word.lower() in (AUTO, CPU):
        advice = f"; write {word.lower()}"
    elif word.lower() == "all":
        advice = f": it is a word of NVIDIA_VISIBLE_DEVICES; for every GPU say --devices auto and leave {VISIBLE} unset"
    elif _says_nothing(word):
        advice = "; for none say --devices cpu"
    elif (found := _TORCH_NAME.fullmatch(word)) is not None:
        advice = f" to CUDA; write its index{f' {found[1]}' if found[1] else ''}, its UUID, or auto"
    elif _CPU_NUMBER.fullmatch(word) is not None:
        advice = "; write cpu"
    elif _RANGE.fullmatch(word) is not None:
        advice = "; write each index by itself, as in 0,1,2"
    elif _SLICE.fullmatch(word) is not None:
        advice = ": it is a word of NVIDIA_VISIBLE_DEVICES; write the UUID of the slice, MIG-..., as nvidia-smi -L shows it"
    elif any(character.isspace() or character in ";|+&" or not character.isprintable() for character in word[1:]):
        advice = "; put commas between devices"
    elif _CUDA_WORD.fullmatch(word) is None:
        advice = "; an index is a whole number such as 0, a UUID begins with GPU- or MIG-, as nvidia-smi -L shows it"
    else:
        return None
    return f"{_quote(word)} is no device{advice}"


def _short(text: str) -> str:
    """What fits into a line with others."""
    return text if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]}..."


def _quote(text: str) -> str:
    return repr(_short(text))


def _check_exist(name: str, words: Sequence[str], there: Inventory, environ: Mapping[str, str]) -> None:
    """Whether each word names a device of its own, as far as the driver tells: without it, CUDA has the last word."""
    if not there.count:
        return
    seen: dict[str, str] = {}
    for word in words:
        found = _identify(word, there)
        if not found:
            listing = f"there is {_listing(word, there)} (nvidia-smi -L)"
            raise SettingsError(name, f"{_quote(word)} names no device of this machine; {listing}")
        if len(found) > 1:
            raise SettingsError(name, f"{_quote(word)} names several devices: {_some(found)}; write more of the UUID")
        (identity,) = found
        counts_by_bus = environ.get(ORDER, BUS_ORDER) == BUS_ORDER
        if counts_by_bus and (other := seen.get(identity)) is not None:
            raise _named_twice(name, other, word)
        seen[identity] = word


def _identify(word: str, there: Inventory) -> list[str]:
    """The UUIDs of what a word may name. CUDA takes the beginning of a UUID too, where only one begins so."""
    if word.isdecimal():
        number = int(word)
        known = {card.index: card.uuid for card in there.cards}
        return [known.get(number, word)] if number < there.count else []
    slices = [each for card in there.cards for each in card.slices or ()]
    if word.startswith("GPU-"):
        found = [card.uuid for card in there.cards if _begins(card.uuid, word)]
        may_be_untold = bool(there.unreadable)
    else:
        found = [each.uuid for each in slices if _begins(each.uuid, word) or each.path.lower() == word.lower()]
        may_be_untold = not slices  # a container may be given a slice and not the right to list it
    return [word] if not found and may_be_untold else found


def _begins(uuid: str, word: str) -> bool:
    return uuid.lower().startswith(word.lower())


def _listing(word: str, there: Inventory) -> str:
    """What there is, in the manner of a word that named nothing."""
    if word.startswith("MIG-"):
        return _some([each.uuid for card in there.cards for each in card.slices or ()])
    if word.startswith("GPU-"):
        return _some([card.uuid for card in there.cards])
    return "GPU 0" if there.count == 1 else f"GPU 0 to {there.count - 1}"


def _some(uuids: Sequence[str]) -> str:
    left_out = len(uuids) - _MOST_LISTED
    return ", ".join(uuids[:_MOST_LISTED]) + (f" and {left_out} more" if left_out > 0 else "")


def _beyond(words: Sequence[str], visible: str | None) -> tuple[Remark, ...]:
    """A list counts all GPUs of the machine, not those that CUDA_VISIBLE_DEVICES shows: said where the two differ."""
    if visible is None:
        return ()
    shown = {entry.strip() for entry in visible.split(",")}
    others = [word for word in words if word not in shown]
    if not others:
        return ()
    told = f"devices: {_short(','.join(others))} is not in {VISIBLE}={_short(visible)}"
    text = f"{told}; a list of devices takes its place, and counts every GPU"
    return (Remark(text, is_warning=True),)


def _all_there_is(there: Inventory, environ: Mapping[str, str]) -> Devices:
    """Every card that can be used; cards in MIG mode by their slices."""
    left_out = [Remark(f"GPU {index} is left out: {problem}", is_warning=True) for index, problem in there.unreadable]
    left_out += [
        Remark(f"GPU {card.index} is left out: it is in MIG mode and has no slice", is_warning=True)
        for card in there.cards
        if card.slices == ()
    ]
    words: list[str] = []
    # CUDA skips what it cannot use, so that indexes would shift.
    by_index = not left_out and all(card.slices is None for card in there.cards)
    for card in there.cards:
        parts = [card.uuid] if card.slices is None else [each.uuid for each in card.slices]
        words += [str(card.index)] if by_index else parts
    if words:
        return Devices(tuple(words), tuple(left_out), tuple(card.uuid for card in there.cards) if by_index else ())
    why = "; ".join(remark.text for remark in left_out) or there.problem
    promised = environ.get("NVIDIA_VISIBLE_DEVICES", "")
    is_promised = not there.count and not _says_nothing(promised)
    if is_promised:
        why += (
            f", although NVIDIA_VISIBLE_DEVICES={promised}: was this container started with its GPUs (docker run --gpus all)?"
        )
    return Devices((CPU,), (_on_cpu(why, is_warning=there.is_broken or is_promised or bool(left_out)),))


def _on_cpu(why: str, *, is_warning: bool) -> Remark:
    return Remark(f"no GPU to use, so the model runs on the CPU: {why}", is_warning)
