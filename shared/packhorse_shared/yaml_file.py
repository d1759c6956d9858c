"""Settings in a YAML file (``--config``).

Scalars are taken as they are written, not as YAML 1.1 reads them: a revision ``0123456`` stays that text and is no octal
number. They then go through the same conversion as flags.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import yaml

from packhorse_shared.errors import SettingsError
from packhorse_shared.load import Given, did_you_mean
from packhorse_shared.settings import Flag, flags

MAX_YAML_BYTES = 1 << 18
_MAX_DEPTH = 16
_NULL = "tag:yaml.org,2002:null"
_PARALLELISM = {
    "tensor_parallel_size",
    "tensor_parallel",
    "tp_size",
    "tp",
    "pipeline_parallel_size",
    "pipeline_parallel",
    "pp_size",
    "pp",
    "context_parallel_size",
    "cp_size",
    "moe_tensor_parallel_size",
    "moe_expert_parallel_size",
    "moe_cluster_parallel_size",
}
_EXTRA_INPUTS = "extra_model_inputs"


class CudaGraphConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys and types of ``cuda_graph_config``; the worker decides what to capture."""

    batch_sizes: list[int] | None = None
    num_tokens: list[int] | None = None
    seq_lens: list[int] | None = None
    enable_padding: bool = False
    max_batch_size: int | None = None
    max_num_token: int | None = None
    max_seq_len: int | None = None


def from_yaml(path: Path) -> dict[str, Given]:
    """What the file sets, by name of the setting. Raises SettingsError that names the file, the line and the key."""
    known = flags()
    found: dict[str, Given] = {}
    for key, node in _entries(path, _parse(path)):
        label = f"{path}:{node.start_mark.line + 1}: {key}"
        if key in _PARALLELISM:
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
    try:
        _check_events(path, content)
        root = yaml.compose(content, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as problem:
        line = problem.problem_mark.line + 1 if problem.problem_mark is not None else 1
        raise SettingsError(f"{path}:{line}", f"is not YAML: {problem.problem}") from None
    except (yaml.YAMLError, RecursionError, UnicodeDecodeError, ValueError) as problem:
        raise SettingsError(f"{path}", f"is not YAML: {' '.join(str(problem).split())[:200]}") from None
    if root is None or root.tag == _NULL:
        return None
    if not isinstance(root, yaml.MappingNode):
        raise SettingsError(f"{path}:{root.start_mark.line + 1}", "must hold settings as `name: value` lines")
    return root


def _check_events(path: Path, content: bytes) -> None:
    """Refuse what could grow: aliases, and nesting, which the parser's time is quadratic in."""
    depth = 0
    for event in yaml.parse(content, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise SettingsError(f"{path}", f"alias *{event.anchor}: aliases are not supported; write the value out")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            line = event.start_mark.line + 1 if event.start_mark is not None else 1
            raise SettingsError(f"{path}:{line}", f"values nested deeper than {_MAX_DEPTH}")


def _entries(path: Path, root: yaml.MappingNode | None) -> list[tuple[str, yaml.Node]]:
    """Keys and nodes of a mapping, each key a text that occurs once; dashes in keys count as underscores."""
    entries: dict[str, yaml.Node] = {}
    for key_node, node in root.value if root is not None else ():
        place = f"{path}:{key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise SettingsError(place, "a key must be the name of a setting")
        key = str(key_node.value).replace("-", "_")
        if key in entries:
            raise SettingsError(f"{place}: {key_node.value}", "is set twice in this file")
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


def check_graph_config(label: str, found: Any) -> dict[str, Any]:
    """The keys and values of a ``cuda_graph_config``. Raises SettingsError that names the setting as ``label``."""
    known = ", ".join(CudaGraphConfig.__struct_fields__)
    if not isinstance(found, dict):
        raise SettingsError(label, f"must hold some of {known}")
    config: dict[str, Any] = dict(found)
    if config.pop(_EXTRA_INPUTS, None):
        raise SettingsError(label, f"{_EXTRA_INPUTS} is not supported in this release")
    try:
        msgspec.convert(config, CudaGraphConfig)
    except (msgspec.ValidationError, RecursionError) as problem:
        raise SettingsError(label, f"{' '.join(str(problem).split())[:200]}; it holds {known}") from None
    return config


def _graph_config(label: str, node: yaml.Node, path: Path) -> dict[str, Any]:
    if not isinstance(node, yaml.MappingNode):
        raise SettingsError(label, f"must hold some of {', '.join(CudaGraphConfig.__struct_fields__)}")
    for key, child in _entries(path, node):
        if key == _EXTRA_INPUTS:
            _refuse_extra_inputs(f"{path}:{child.start_mark.line + 1}: cuda_graph_config.{key}", child)
    loader = yaml.SafeLoader("")
    try:
        config = loader.construct_document(node)
    except (yaml.YAMLError, ValueError, RecursionError) as problem:
        reason = " ".join(str(problem).split())[:200]
        raise SettingsError(label, f"{reason}; it holds {', '.join(CudaGraphConfig.__struct_fields__)}") from None
    finally:
        loader.dispose()
    return check_graph_config(label, config)


def _refuse_parallelism(label: str, node: yaml.Node) -> None:
    """1 means what Packhorse does anyway, so configurations written for other servers keep working."""
    if isinstance(node, yaml.ScalarNode) and (node.value == "1" or node.tag == _NULL):
        return
    raise SettingsError(
        label,
        "a model is not split over devices here (tensor and pipeline parallelism); each device holds a whole copy, "
        "see --devices and --workers_per_device",
    )


def _refuse_extra_inputs(label: str, node: yaml.Node) -> None:
    if node.tag == _NULL or node.value == []:
        return
    raise SettingsError(
        label,
        "an HTTP request carries texts or token ids only, so a server cannot feed them; use packhorse.Encoder in Python",
    )
