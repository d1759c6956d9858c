"""The command line of ``packhorse bench``, and what it comes to."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

import msgspec

from packhorse.locate import locate, names_a_server, tool_parser
from packhorse_shared.arguments import Parser, add_option, parse
from packhorse_shared.settings import HttpSettings

Endpoint = Literal["embeddings", "rerank", "score", "classify"]
EncodingFormat = Literal["float", "base64"]

DEFAULT_URL = "http://127.0.0.1:8000"
_SCHEMES = ("http://", "https://", "unix:")
_DESCRIPTION = """Load a running server and tell its throughput and latency: of URL, of the server that --port or --run_dir
names, else of the one at http://127.0.0.1:8000. Ctrl-C ends the run early and reports."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the command. Defaults stand here and in the help."""

    urls: tuple[str, ...]
    """One server, or two that are compared."""
    endpoint: Endpoint = "embeddings"
    texts: str = "short"
    """The name of a set (texts.py), or a path."""
    inputs: int | None = None
    """Inputs a request; None is what the set of texts says."""
    encoding_format: EncodingFormat = "float"
    concurrency: int = 16
    """Clients of the closed loop."""
    rate: float | None = None
    """Requests/s of the open loop; None is a closed loop."""
    duration: float | None = None
    """Seconds that each server is loaded; None where ``requests`` says when it ends."""
    requests: int | None = None
    warmup: float = 1.0
    """Seconds."""
    rounds: int = 1
    """Slices that the load on each of two servers is cut into."""
    connections: int = 1000
    """Most connections of the open loop."""
    timeout: float = 60.0
    """Seconds."""
    seed: int = 7
    model: str | None = None
    api_key: str | None = None
    json: str | None = None
    plot: str | None = None


def read_options(argv: list[str], environ: Mapping[str, str]) -> Options:
    """Parse the command line; a mistake ends the process with one line and status 2. Raises CannotStartError when no server
    runs where ``--port`` or ``--run_dir`` says."""
    parser = _make_parser()
    parsed, settings = parse(parser, argv, environ)
    given: dict[str, Any] = {name: getattr(parsed, name, None) for name in Options.__struct_fields__}
    given = {name: value for name, value in given.items() if value is not None}
    given |= {"urls": _urls(parser, parsed, argv, environ), "api_key": _key(settings.http)}
    if parsed.requests is None:
        given.setdefault("duration", 10.0)
    if parsed.against is not None:
        given.setdefault("rounds", 5)
    _check(parser, parsed)
    return Options(**given)


def _make_parser() -> Parser:
    parser = tool_parser("bench", _DESCRIPTION, otherwise="", usage="%(prog)s [URL] [flags]")
    parser.add_argument("url", metavar="URL", nargs="?", type=_url, help="http://..., https://... or unix:PATH of the server")
    what = parser.add_argument_group("What is sent")
    add_option(what, "endpoint", f"{', '.join(get_args(Endpoint))} (default embeddings)", choices=get_args(Endpoint))
    add_option(what, "texts", "short, mixed, bulk, long, or a file of JSON lines (default short)", metavar="SET|FILE")
    add_option(what, "inputs", "inputs in each request (default 1; 32 for bulk)", type=_whole(1, 100_000), metavar="N")
    formats = get_args(EncodingFormat)
    add_option(what, "encoding_format", "float or base64, for embeddings (default float)", choices=formats)
    add_option(what, "model", "name in the requests (default: the first that /v1/models gives)", metavar="NAME")
    add_option(what, "seed", "of texts and arrivals (default 7)", type=_whole(0, 2**63), metavar="N")
    how = parser.add_argument_group("How it is sent")
    loop = how.add_mutually_exclusive_group()
    text = "closed loop: so many clients, each sends when it has its answer (default 16)"
    add_option(loop, "concurrency", text, type=_whole(1, 10_000), metavar="N")
    text = "open loop: so many requests/s at random times, whatever becomes of those before"
    add_option(loop, "rate", text, type=_number(0.01, 100_000), metavar="R")
    text = "most connections of the open loop (default 1000)"
    add_option(how, "connections", text, type=_whole(1, 30_000), metavar="N")
    until = how.add_mutually_exclusive_group()
    add_option(until, "duration", "for each server (default 10)", type=_number(0.1, 604_800), metavar="SECONDS")
    add_option(until, "requests", "end after so many for each server", type=_whole(1, 10**9), metavar="N")
    add_option(how, "warmup", "of the same load before it counts (default 1)", type=_number(0, 3600), metavar="SECONDS")
    add_option(how, "timeout", "of one request (default 60)", type=_number(0.01, 3600), metavar="SECONDS")
    add_option(how, "against", "compare with this server, in alternating slices of one run", type=_url, metavar="URL")
    add_option(how, "rounds", "slices for each server with --against (default 5)", type=_whole(1, 1000), metavar="N")
    text = "Bearer key, visible in `ps`: prefer PACKHORSE_API_KEY or the file"
    add_option(how, "api_key", text, metavar="KEY")
    add_option(how, "api_key_file", "its first key is used", metavar="FILE")
    out = parser.add_argument_group("What comes out, beside the tables")
    add_option(out, "json", "all figures as JSON; - is standard output", metavar="FILE|-")
    add_option(out, "plot", "a picture: .png, .svg or .pdf", type=_picture, metavar="FILE")
    return parser


def _check(parser: Parser, parsed: argparse.Namespace) -> None:
    if parsed.encoding_format and parsed.endpoint not in (None, "embeddings"):
        parser.error(f"--encoding_format: only for embeddings, not for {parsed.endpoint}")
    if parsed.connections and not parsed.rate:
        parser.error("--connections: only for the open loop of --rate; a closed loop has --concurrency connections")
    if parsed.rounds and not parsed.against:
        parser.error("--rounds: only with --against")
    for name, path in (("json", parsed.json), ("plot", parsed.plot)):
        if path not in (None, "-") and not Path(path).expanduser().absolute().parent.is_dir():
            parser.error(f"--{name}: there is no folder {Path(path).expanduser().parent}")


def _urls(parser: Parser, parsed: argparse.Namespace, argv: list[str], environ: Mapping[str, str]) -> tuple[str, ...]:
    if parsed.url is not None:
        for name in ("port", "run_dir"):
            if getattr(parsed, name) is not None:
                parser.error(f"--{name}: the server is named already, by {parsed.url}")
        url = parsed.url
    elif names_a_server(parsed, environ):
        _, run_dir = locate(parser, argv, environ)
        url = run_dir.read_server().url
    else:
        url = DEFAULT_URL
    return (url,) if parsed.against is None else (url, parsed.against)


def _key(http: HttpSettings) -> str | None:
    """The flag or variable, else what the file begins with; ``load_settings`` has checked both."""
    if http.api_key:
        return http.api_key[0]
    if http.api_key_file is None:
        return None
    return Path(http.api_key_file).expanduser().read_text(encoding="utf-8").split()[0]


def _url(word: str) -> str:
    """An address without what clients put behind it: a slash, or the /v1 of their base_url."""
    try:
        is_address = word.startswith(_SCHEMES) and word not in _SCHEMES and urlsplit(word).port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise argparse.ArgumentTypeError(f"{word!r} is no address; give http://HOST:PORT, https://HOST:PORT or unix:PATH")
    return word if word.startswith("unix:") else word.rstrip("/").removesuffix("/v1")


def _picture(word: str) -> str:
    if Path(word).suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{word!r} is no name of a picture; end it with .png, .svg or .pdf")
    return word


def _whole(low: int, high: int) -> Callable[[str], int]:
    def read(word: str) -> int:
        if not (word.isascii() and word.isdigit() and len(word) < 20 and low <= int(word) <= high):
            raise argparse.ArgumentTypeError(f"{word!r} is not allowed; give a whole number from {low} to {high}")
        return int(word)

    return read


def _number(low: float, high: float) -> Callable[[str], float]:
    def read(word: str) -> float:
        try:
            number = float(word)
        except ValueError:
            number = math.nan
        if not low <= number <= high:
            raise argparse.ArgumentTypeError(f"{word!r} is not allowed; give a number from {low:g} to {high:g}")
        return number

    return read
