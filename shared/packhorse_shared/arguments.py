"""The command line of every process, and the one way from argv, environment and files to the settings tree.

Precedence: flag, environment, YAML file, Triton file, default.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from packhorse_shared import parallelism
from packhorse_shared.checks import check_contradictions
from packhorse_shared.environment import FILES, PREFIX, from_environment, to_environment
from packhorse_shared.errors import SettingsError
from packhorse_shared.load import Given, build, did_you_mean, to_text
from packhorse_shared.named_file import find_file
from packhorse_shared.settings import SECTIONS, Flag, Settings, flags
from packhorse_shared.triton import from_triton
from packhorse_shared.yaml_file import from_yaml

__all__ = ["EXIT_USAGE", "Parser", "add_option", "add_settings", "explicit", "load_settings", "parse", "to_environment"]

EXIT_USAGE = 2
"""Exit status for a command line or settings that cannot be used."""

_FILE_HELP = {
    "config": "YAML file with any of these settings by the same names, and cuda_graph_config",
    "triton_config": "take max_batch_size, max_queue_delay and max_queue_size from a Triton config.pbtxt",
}
PATH_SETTINGS = ("run_dir", "curve_keys", "uds", "api_key_file", "ssl_keyfile", "ssl_certfile")
_UNKNOWN = re.compile(r"unrecognized arguments: (.*)", re.DOTALL)


class Parser(argparse.ArgumentParser):
    """An argument parser whose mistakes are one line, with what was probably meant, and exit status 2."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False, formatter_class=argparse.HelpFormatter)

    def error(self, message: str) -> NoReturn:
        """Print one line and exit."""
        unknown = _UNKNOWN.fullmatch(message)
        if unknown is not None:
            first = unknown[1].split()[0] if unknown[1].split() else "''"
            message = self._unknown(first.split("=")[0])
        self.exit(EXIT_USAGE, f"{self.prog}: {' '.join(message.split())}\n")

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"unexpected argument {word}"
        name = word.lstrip("-").replace("-", "_")
        if name in parallelism.WORDS:
            return f"{word}: {parallelism.REFUSAL}"
        visible = [option[2:] for option in self._option_string_actions if "=" not in option and option.startswith("--")]
        return f"unknown flag {word}{did_you_mean(name, visible, '--')}"


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every setting, under the headings of their sections.

    Every flag takes underscores or dashes. Nothing is converted or defaulted here: ``load_settings`` does that.
    """
    wanted = [flag for flag in flags().values() if not flag.yaml_only]
    for section, heading in SECTIONS.items():
        group = parser.add_argument_group(heading)
        for flag in wanted:
            if flag.section == section:
                _add_flag(group, flag)
    group = parser.add_argument_group("Files of settings")
    for name in FILES:
        add_option(group, name, f"{_FILE_HELP[name]} ({PREFIX}{name.upper()})", metavar="FILE")


def explicit(parsed: argparse.Namespace) -> frozenset[str]:
    """Names of the settings that were given as flags."""
    return frozenset(name for name in flags() if getattr(parsed, name, None) is not None)


def load_settings(parsed: argparse.Namespace, environ: Mapping[str, str]) -> Settings:
    """The settings from flags, environment, YAML file, Triton file and defaults, in this order of precedence.

    Raises SettingsError: one line that names the setting as it was given, says what was wrong and what is allowed.
    """
    in_environment = from_environment(environ)
    paths = {name: _file(parsed, in_environment.pop(name, None), name) for name in FILES}
    given: dict[str, Given] = {}
    if (triton := paths["triton_config"]) is not None:
        given |= from_triton(triton)
    if (config := paths["config"]) is not None:
        given |= from_yaml(config)
    given |= in_environment
    for name in explicit(parsed):
        value = getattr(parsed, name)
        given[name] = Given(f"--{name}", tuple(value) if isinstance(value, list) else (str(value),))
    settings = build(given)
    return check_contradictions(settings, {name: source.label for name, source in given.items()})


def _file(parsed: argparse.Namespace, in_environment: Given | None, name: str) -> Path | None:
    text = getattr(parsed, name, None)
    label = f"--{name}"
    if text is None and in_environment is not None:
        text, label = in_environment.texts[-1], in_environment.label
    if text is None:
        return None
    if not text.strip():
        raise SettingsError(label, "is empty; give the path of a file")
    return find_file(label, text)


def _add_flag(group: Any, flag: Flag) -> None:
    words = f": {', '.join(flag.choices)}" if len(flag.choices) > 1 else ""
    text = f"{flag.description}{words} ({_default(flag)}{flag.variable})"
    if flag.is_switch:
        add_option(group, flag.name, text, action="store_const", const="true")
        for word in ("true", "false"):
            for spelling in {flag.name, flag.name.replace("_", "-")}:
                option = f"--{spelling}={word}"
                group.add_argument(
                    option, dest=flag.name, action="store_const", const=word, default=None, help=argparse.SUPPRESS
                )
    else:
        add_option(group, flag.name, text, action="append" if flag.repeatable else "store", metavar=_metavar(flag))


def add_option(group: Any, name: str, text: str, **options: Any) -> None:
    """One flag in both spellings; help shows the one with underscores."""
    group.add_argument(f"--{name}", dest=name, default=None, help=text.replace("%", "%%"), **options)
    if "_" in name:
        spelling = f"--{name.replace('_', '-')}"
        group.add_argument(spelling, dest=name, default=None, help=argparse.SUPPRESS, **options)


def _default(flag: Flag) -> str:
    """``default 32; ``, or nothing where the description says what the default is."""
    if flag.default in (None, "", False, ()):
        return ""
    if flag.name.endswith("_bytes"):
        return f"default {flag.default >> 20} MiB; "
    text = f"{flag.default:g}" if isinstance(flag.default, float) else to_text(flag, flag.default)
    return f"default {text}; "


def _metavar(flag: Flag) -> str:
    if flag.name in PATH_SETTINGS:
        return "PATH"
    if flag.name == "normalize":
        return "true|false"
    if isinstance(flag.default, float) or flag.name == "max_queue_delay":
        return "SECONDS"
    if isinstance(flag.default, int) or flag.name == "max_seq_len":
        return "N"
    return "WORD" if flag.choices else "LIST" if flag.repeatable else "TEXT"


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str], environ: Mapping[str, str]
) -> tuple[argparse.Namespace, Settings]:
    """Parse a command line and load its settings; a mistake in either ends the process with one line and status 2."""
    parsed = parser.parse_args(argv)
    try:
        return parsed, load_settings(parsed, environ)
    except SettingsError as problem:
        parser.error(str(problem))
