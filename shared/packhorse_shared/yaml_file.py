"""Settings in a YAML file (``--config``).

Scalars are taken as they are written, not as YAML 1.1 reads them: a revision ``0123456`` stays that text and is no octal
number. They then go through the same conversion as flags.
"""

from __future__ import annotations

import codecs
import re
from pathlib import Path
from typing import Any

import yaml

from packhorse_shared import parallelism
from packhorse_shared.errors import SettingsError
from packhorse_shared.graph_config import GraphConfigError, read_graph_config, refuse_extra_inputs
from packhorse_shared.load import Given, did_you_mean
from packhorse_shared.settings import Flag, flags

MAX_YAML_BYTES = 1 << 18
_MAX_DEPTH = 16
_NULL = "tag:yaml.org,2002:null"
_INTEGER = "tag:yaml.org,2002:int"
_DECIMAL = re.compile(r"[+-]?(0|[1-9]\d{0,18})", re.ASCII)
_EXTRA_INPUTS = "extra_model_inputs"


def from_yaml(path: Path) -> dict[str, Given]:
    """What the file sets, by name of the setting. Raises SettingsError that names the file, the line and the key."""
    known = flags()
    found: dict[str, Given] = {}
    for key, node in _entries(path, _parse(path)):
        label = f"{path}:{node.start_mark.line + 1}: {key}"
        if key in parallelism.WORDS:
            _refuse_parallelism(label, node)
            continue
        if key == _EXTRA_INPUTS:
            _refuse_extra_inputs(label, node)
            continue
        if key not in known:
            raise SettingsError(label, f"unknown setting{did_you_mean(key, known)}")
        if node.tag == _NULL:
            continue
        found[key] = _given(known[key], label, node, path)
    return found


def _parse(path: Path) -> yaml.MappingNode | None:
    try:
        content = path.read_bytes()
    except OSError as problem:
        raise SettingsError(f"{path}", f"cannot be read: {problem.strerror}") from None
    if len(content) > MAX_YAML_BYTES:
        raise SettingsError(f"{path}", f"has {len(content)} bytes, limit {MAX_YAML_BYTES}")
    text = _decode(path, content)
    try:
        _check_events(path, text)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.reader.ReaderError as problem:
        what = f"holds the character U+{ord(text[problem.position]):04X}, which YAML does not allow"
        raise SettingsError(f"{path}:{_line(text[: problem.position])}", f"{what}; write the file in UTF-8") from None
    except yaml.MarkedYAMLError as problem:
        line = problem.problem_mark.line + 1 if problem.problem_mark is not None else 1
        raise SettingsError(f"{path}:{line}", f"is not YAML: {problem.problem}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as problem:
        raise SettingsError(f"{path}", f"is not YAML: {' '.join(str(problem).split())[:200]}") from None
    if root is None or root.tag == _NULL:
        return None
    if not isinstance(root, yaml.MappingNode):
        raise SettingsError(f"{path}:{root.start_mark.line + 1}", "must hold settings as `name: value` lines")
    return root


def _decode(path: Path, content: bytes) -> str:
    """The text of the file. UTF-16 is taken where a byte order mark says that it is that, as YAML has it."""
    encoding = "utf-16" if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as problem:
        if encoding == "utf-16":
            raise SettingsError(f"{path}", "is not UTF-16, as its byte order mark says; write the file in UTF-8") from None
        line = _line(problem.object[: problem.start].decode())
        wrong = f"is not UTF-8 (byte 0x{problem.object[problem.start]:02X})"
        raise SettingsError(f"{path}:{line}", f"{wrong}; write the file in UTF-8") from None


def _line(before: str) -> int:
    """The line in which what comes behind a text is."""
    return len(f"{before}.".splitlines())


def _check_events(path: Path, content: str) -> None:
    """Refuse what could grow: aliases, and nesting, which the parser's time is quadratic in."""
    depth = 0
    for event in yaml.parse(content, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise SettingsError(_place(path, event), f"alias *{event.anchor}: aliases are not supported; write the value out")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise SettingsError(_place(path, event), f"values nested deeper than {_MAX_DEPTH}")


def _place(path: Path, event: yaml.Event) -> str:
    return f"{path}:{event.start_mark.line + 1 if event.start_mark is not None else 1}"


def _entries(path: Path, root: yaml.MappingNode | None, inside: str = "") -> list[tuple[str, yaml.Node]]:
    """Keys and nodes of a mapping, each key a text that occurs once; dashes in keys count as underscores.

    ``inside``: the key whose value it is, for messages.
    """
    entries: dict[str, yaml.Node] = {}
    for key_node, node in root.value if root is not None else ():
        place = f"{path}:{key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise SettingsError(f"{place}: {inside}" if inside else place, "a key must be the name of a setting")
        key = str(key_node.value).replace("-", "_")
        if key in entries:
            name = f"{inside}.{key_node.value}" if inside else key_node.value
            raise SettingsError(f"{place}: {name}", "is set twice in this file")
        entries[key] = node
    return list(entries.items())


def _given(flag: Flag, label: str, node: yaml.Node, path: Path) -> Given:
    if flag.yaml_only:
        return Given(label, value=_graph_config(label, node, path))
    nodes = node.value if isinstance(node, yaml.SequenceNode) and flag.repeatable else [node]
    if not all(isinstance(each, yaml.ScalarNode) for each in nodes):
        raise SettingsError(label, f"must be a {'list of texts' if flag.repeatable else 'single value'}")
    texts = tuple(str(each.value) for each in nodes)
    if isinstance(node, yaml.SequenceNode) and any("," in text for text in texts):
        raise SettingsError(label, "a comma separates entries, so an entry cannot contain one")
    return Given(label, texts)


def _graph_config(label: str, node: yaml.Node, path: Path) -> dict[str, Any]:
    """The ``cuda_graph_config`` as it is written, once it is found to be right; a message names the line of what is not."""
    if not isinstance(node, yaml.MappingNode):
        return read_graph_config(_plain(label, node), label).to_dict()  # raises: it is none
    lines: dict[str | None, str] = {None: label}
    config: dict[str, Any] = {}
    for key, child in _entries(path, node, "cuda_graph_config"):
        lines[key] = f"{path}:{child.start_mark.line + 1}: cuda_graph_config.{key}"
        if key == _EXTRA_INPUTS:
            _refuse_extra_inputs(lines[key], child)
        else:
            config[key] = _plain(lines[key], child)
    try:
        read_graph_config(config)
    except GraphConfigError as problem:
        raise SettingsError(lines.get(problem.field, label), problem.problem) from None
    return config


def _plain(label: str, node: yaml.Node) -> Any:
    """The value of a node. Whole numbers are decimal here: YAML 1.1 reads 010 as 8, and 1:30 as 90."""
    if isinstance(node, yaml.SequenceNode):
        return [_plain(label, each) for each in node.value]
    if isinstance(node, yaml.ScalarNode) and node.tag == _INTEGER:
        return int(node.value) if _DECIMAL.fullmatch(node.value) else str(node.value)
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_document(node)
    except (yaml.YAMLError, ValueError, RecursionError) as problem:
        raise SettingsError(label, " ".join(str(problem).split())[:200]) from None
    finally:
        loader.dispose()


def _refuse_parallelism(label: str, node: yaml.Node) -> None:
    """1 means what Packhorse does anyway, so configurations written for other servers keep working."""
    if isinstance(node, yaml.ScalarNode) and (node.value == "1" or node.tag == _NULL):
        return
    raise SettingsError(label, parallelism.REFUSAL)


def _refuse_extra_inputs(label: str, node: yaml.Node) -> None:
    if node.tag != _NULL and node.value != []:
        refuse_extra_inputs(label)
