"""Settings in the environment: ``PACKHORSE_<FLAG>``, read at a start and written for the processes of the run."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from packhorse_shared import parallelism
from packhorse_shared.errors import SettingsError
from packhorse_shared.graph_config import read_graph_config, refuse_extra_inputs
from packhorse_shared.load import MAX_VALUE_CHARACTERS, Given, did_you_mean, to_text
from packhorse_shared.settings import Settings, flags

PREFIX = "PACKHORSE_"
FILES = ("config", "triton_config")
"""Settings that name a file of settings."""

SUPERVISED = "PACKHORSE_SUPERVISED"
"""Not a setting: supervisord.conf sets it, and who sees it ends with supervisord."""

_KUBERNETES = re.compile(r"PACKHORSE_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
_KUBERNETES_PORT = re.compile(r"PACKHORSE_(\w+_)?PORT")
"""Kubernetes puts these, the latter as tcp://..., into every pod beside a service that is called packhorse or packhorse-..."""


def from_environment(environ: Mapping[str, str]) -> dict[str, Given]:
    """What the environment sets, by name of the setting, ``config`` and ``triton_config`` included.

    Raises SettingsError for a variable that has our prefix and is no setting.
    """
    known = {flag.variable: flag for flag in flags().values()}
    files = {f"{PREFIX}{name.upper()}": name for name in FILES}
    found: dict[str, Given] = {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable == SUPERVISED or _is_of_kubernetes(variable, text):
            continue
        if variable in files:
            found[files[variable]] = Given(variable, (text,))
        elif variable not in known:
            name = variable.removeprefix(PREFIX)
            if name.lower() in parallelism.WORDS:
                raise SettingsError(variable, parallelism.REFUSAL)
            names = [each.removeprefix(PREFIX) for each in (*known, *files)]
            raise SettingsError(variable, f"unknown setting{did_you_mean(name, names, PREFIX)}")
        elif known[variable].yaml_only:
            found[known[variable].name] = Given(variable, value=_decode_tree(variable, text))
        else:
            found[known[variable].name] = Given(variable, (text,))
    return found


def to_environment(settings: Settings) -> dict[str, str]:
    """The settings as variables: a process that loads its settings from them gets the very same tree.

    Defaults are left out. API keys are in the result: it is for the environment of a child only. ``cuda_graph_config``,
    which users write in YAML, travels as JSON. Raises SettingsError when that is too large to travel.
    """
    variables: dict[str, str] = {}
    for flag in flags().values():
        value = getattr(getattr(settings, flag.section), flag.name)
        if value == flag.default:
            continue
        text = msgspec.json.encode(value).decode() if flag.yaml_only else to_text(flag, value)
        if len(text) > MAX_VALUE_CHARACTERS:
            raise SettingsError(flag.name, f"has {len(text)} characters, limit {MAX_VALUE_CHARACTERS}")
        variables[flag.variable] = text
    return variables


def without_ours(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment with none of our variables."""
    return {variable: text for variable, text in environ.items() if not variable.startswith(PREFIX)}


def _is_of_kubernetes(variable: str, text: str) -> bool:
    return _KUBERNETES.fullmatch(variable) is not None or (_KUBERNETES_PORT.fullmatch(variable) is not None and "://" in text)


def _decode_tree(variable: str, text: str) -> dict[str, object]:
    try:
        found = msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.DecodeError, RecursionError):
        raise SettingsError(variable, "is no JSON object; write this setting in the YAML file of --config") from None
    if read_graph_config(found, variable).extra_model_inputs:
        refuse_extra_inputs(f"{variable}.extra_model_inputs")
    return found
