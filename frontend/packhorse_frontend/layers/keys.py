"""API keys: where they come from, and comparing them without telling how much of one was right."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from packhorse_shared.errors import SettingsError
from packhorse_shared.settings import HttpSettings

_SCHEME = b"bearer"


class Keys:
    """The accepted keys, as digests: all the same length, and no key is kept."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(_digest(key.encode("utf-8")) for key in keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def accept(self, authorization: bytes) -> bool:
        """Whether the value of an Authorization header holds one of the keys. Takes as long whichever it is."""
        scheme, _, given = authorization.strip().partition(b" ")
        digest = _digest(given.strip())
        is_known = False
        for known in self._digests:
            is_known |= hmac.compare_digest(known, digest)
        return is_known and scheme.lower() == _SCHEME


def load_keys(settings: HttpSettings) -> Keys:
    """The keys of ``api_key`` and ``api_key_file``; none means that every request is let in. Raises SettingsError."""
    keys = [key.strip() for key in settings.api_key]
    if not all(keys):
        raise SettingsError("api_key", "holds an empty key")
    if settings.api_key_file is not None:
        keys += _read_keys(Path(settings.api_key_file).expanduser())
    return Keys(keys)


def _read_keys(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "it is not UTF-8 text"
        raise SettingsError("api_key_file", f"cannot read {path}: {reason}") from None
    keys = [key for line in lines if (key := line.strip()) and not key.startswith("#")]
    if not keys:
        raise SettingsError("api_key_file", f"{path} holds no key; put one on each line, or leave the setting out")
    return keys


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
