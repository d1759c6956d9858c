"""What single settings cannot say about themselves: settings that contradict each other, and files that must be readable."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from packhorse_shared.devices import AUTO, checked_words
from packhorse_shared.errors import SettingsError
from packhorse_shared.named_file import find_file
from packhorse_shared.settings import ProcessSettings, Settings

LONGEST_UDS_BYTES = 107
"""Of sockaddr_un on Linux."""
_BROKER = re.compile(r"tcp://(\*|[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?\]):(?P<port>\d{1,5})", re.ASCII)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s@]+", re.IGNORECASE)


def check_contradictions(settings: Settings, labels: Mapping[str, str]) -> Settings:
    """The settings in their final form. ``labels`` says how each was given. Raises SettingsError. Touches no file."""

    def label(name: str) -> str:
        return labels.get(name, f"--{name}")

    http = settings.http
    if http.ssl_keyfile is not None and http.ssl_certfile is None:
        raise SettingsError(label("ssl_keyfile"), "needs --ssl_certfile, the certificate that belongs to the key")
    if http.uds is not None:
        _check_uds(label, settings)
    for origin in http.cors_allow_origin:
        if origin == "*" and len(http.cors_allow_origin) == 1:
            continue
        if not _ORIGIN.fullmatch(origin):
            raise SettingsError(
                label("cors_allow_origin"), f"{origin!r} is no origin; give scheme://host or scheme://host:port, or * alone"
            )
    if any(not key.isascii() or not key.isprintable() or " " in key for key in http.api_key):
        raise SettingsError(label("api_key"), "a key must be visible ASCII characters without spaces, as HTTP carries it")
    if http.root_path and not http.root_path.startswith("/"):
        raise SettingsError(label("root_path"), f"{http.root_path!r} must start with /")
    _check_broker(label, settings.process)
    _check_matryoshka(label("matryoshka_dimensions"), settings.model.matryoshka_dimensions)
    if settings.workers.devices != (AUTO,):
        try:
            checked_words(settings.workers.devices)
        except SettingsError as problem:
            raise SettingsError(label("devices"), str(problem).removeprefix("devices: ")) from None
    return msgspec.structs.replace(settings, http=msgspec.structs.replace(http, root_path=http.root_path.rstrip("/")))


def check_files(settings: Settings) -> None:
    """Whether the files that settings name can be used, checked once at the start of a server. Raises SettingsError."""
    http = settings.http
    if http.api_key_file is not None:
        _check_readable("--api_key_file", http.api_key_file)
        try:
            lines = Path(http.api_key_file).expanduser().read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError):
            lines = []
        if not lines:
            raise SettingsError("--api_key_file", f"{http.api_key_file} holds no key; write one a line")
    for name, path in (("--ssl_certfile", http.ssl_certfile), ("--ssl_keyfile", http.ssl_keyfile)):
        if path is not None:
            _check_readable(name, path)
    if http.ssl_certfile is not None:
        _check_certificate(http.ssl_certfile, http.ssl_keyfile)
    if settings.process.curve_keys is not None:
        from packhorse_shared.key_folders import read_broker_keys  # noqa: PLC0415 (ZeroMQ, which few servers need here)

        read_broker_keys(Path(settings.process.curve_keys).expanduser())


def _check_uds(label: Callable[[str], str], settings: Settings) -> None:
    http = settings.http
    assert http.uds is not None
    if http.num_frontends > 1:
        raise SettingsError(
            label("uds"), f"a Unix socket is served by one frontend only, and {label('num_frontends')} is {http.num_frontends}"
        )
    size = len(os.fsencode(Path(http.uds).expanduser().absolute()))
    if size > LONGEST_UDS_BYTES:
        raise SettingsError(label("uds"), f"its path has {size} bytes, limit {LONGEST_UDS_BYTES}")


def _check_broker(label: Callable[[str], str], process: ProcessSettings) -> None:
    if process.broker is None:
        if process.curve_keys is not None:
            raise SettingsError(label("curve_keys"), "needs --broker, the address to which the keys belong")
        return
    found = _BROKER.fullmatch(process.broker)
    if found is None or not 1 <= int(found["port"]) <= 65_535:
        raise SettingsError(label("broker"), f"{process.broker!r} is not allowed; give tcp://HOST:PORT")
    if process.curve_keys is None:
        raise SettingsError(label("broker"), "tcp:// needs --curve_keys, a folder of keys that packhorse keys makes")


def _check_matryoshka(label: str, dimensions: tuple[str, ...]) -> None:
    if dimensions == ("any",):
        return
    for word in dimensions:
        if not re.fullmatch(r"0*[1-9]\d{0,8}", word, re.ASCII):
            raise SettingsError(label, f"{word!r} is not allowed; give sizes such as 64,128, or any alone")


def _check_readable(name: str, text: str) -> None:
    if not os.access(find_file(name, text), os.R_OK):
        raise SettingsError(name, f"{text} may not be read by this user")


def _check_certificate(certfile: str, keyfile: str | None) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    key = None if keyfile is None else Path(keyfile).expanduser()
    try:
        context.load_cert_chain(Path(certfile).expanduser(), key, password="")
    except (ssl.SSLError, OSError, ValueError) as problem:
        raise SettingsError("--ssl_certfile", f"{certfile} cannot be used with its key: {problem}") from None
