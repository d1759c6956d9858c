"""The bodies of requests and answers, and the rules of their fields.

One set of types validates requests and describes the API (``msgspec.json.schema``). Unknown fields are ignored, since clients
and gateways add them; null means absent; a known field of a wrong type is refused by its name.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from packhorse_frontend.problems import Problem, invalid

T = TypeVar("T")

# A list may hold each of these, but all of one kind; `inputs.py` sees to that, and says which element is the odd one.
InputElement = str | int | list[int]


class EmbeddingsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /v1/embeddings."""

    model: Annotated[str | None, Meta(description="one of the served names; the served model when absent")] = None
    input: Annotated[
        str | list[InputElement] | None,
        Meta(description="text, list of texts, token ids of one input, or list of token id lists; ids are used as they are"),
    ] = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None, Meta(description="base64 packs little-endian float32; float by default")
    ] = None
    dimensions: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="shorter vectors from a Matryoshka model, else exactly the model's own size"),
    ] = None
    add_special_tokens: Annotated[bool | None, Meta(description="true by default; has no effect on token ids")] = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1)] | None,
        Meta(description="null refuses inputs that are too long, -1 cuts them to the model's limit, n to n tokens"),
    ] = None
    prompt_name: Annotated[str | None, Meta(description="name of one of the model's own prompts")] = None
    prompt: Annotated[str | None, Meta(description="text put before every input")] = None
    input_type: Annotated[
        str | None, Meta(description="query or document: picks the model's matching prompt, where it has one")
    ] = None
    priority: Annotated[Annotated[int, Meta(ge=-100, le=100)] | None, Meta(description="lower runs first; 0 by default")] = None
    user: Annotated[str | None, Meta(description="accepted and ignored")] = None


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens of a request. ``truncated_inputs`` stands only where truncation was asked for."""

    prompt_tokens: int
    total_tokens: int
    truncated_inputs: int | msgspec.UnsetType = msgspec.UNSET


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """One vector: numbers, or base64 of little-endian float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of POST /v1/embeddings. Written by ``render.py`` straight from the float32 rows; this type describes it."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: Usage


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One served name. What the model is like is null until a worker has loaded it."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "packhorse"
    dimension: int | None
    max_seq_len: int | None
    task: str | None


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Healthy(msgspec.Struct, frozen=True):
    """Answer of GET /health and GET /live."""

    status: Literal["ok"] = "ok"


_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_AT = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?$", re.DOTALL)
_CHOICES = {"encoding_format": "float or base64"}
_MISSING = re.compile(r"required field `(\w+)`")


class BodyParser:
    """Parses bodies of one type. Raises Problem (400) naming the field, and the element where it is known."""

    def __init__(self, kind: type[Any]) -> None:
        self._decoder = msgspec.json.Decoder(kind)

    def parse(self, body: bytes) -> Any:
        """The body as ``kind``."""
        if body.startswith(_BYTE_ORDER_MARK):
            body = body[len(_BYTE_ORDER_MARK) :]
        if not body.strip(b" \t\r\n"):
            raise invalid("the request has no body; send a JSON object", None)
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError as problem:
            raise _explain_type(str(problem)) from None
        except RecursionError:
            raise invalid("the body is nested too deeply", None) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as problem:
            raise _explain_syntax(body, str(problem)) from None


def _explain_type(problem: str) -> Problem:
    """``Expected `int`, got `bool` - at `$.input[0][1]``` becomes ``input[0][1]: expected int, got bool``."""
    found = _AT.match(problem)
    what, path = (found["what"], found["path"] or "") if found else (problem, "")
    path = path.lstrip(".")
    what = what.replace("`", "").replace(" | null", "")
    what = what[:1].lower() + what[1:]
    field = re.split(r"[.\[]", path, maxsplit=1)[0] or None
    if field is None:
        missing = _MISSING.search(problem)
        field = missing[1] if missing else None
    if field is None:
        return invalid(f"the body is not what it should be: {what}", None)
    if what.startswith("invalid enum value") and field in _CHOICES:
        what += f", expected {_CHOICES[field]}"
    return invalid(f"{path or field}: {what}", field)


def _explain_syntax(body: bytes, problem: str) -> Problem:
    """Why bytes are not JSON. A lone surrogate is looked for, since msgspec has no clear word for it."""
    if b"\\ud" in body or b"\\uD" in body or "UTF-8" in problem:
        try:
            content = json.loads(body.decode("utf-8", "surrogateescape"))
        except (ValueError, RecursionError):
            content = None
        place = _find_surrogate(content) if isinstance(content, dict) else None
        if place is not None:
            field, label = place
            return invalid(f"{label}: holds a lone surrogate or bytes that are not UTF-8, which is no valid text", field)
    return invalid(f"the body is not valid JSON: {problem[:1].lower()}{problem[1:]}", None)


def _find_surrogate(content: dict[str, Any]) -> tuple[str | None, str] | None:
    """The first field of a body with a string that cannot be encoded: its name, and its name with the index."""
    for field, value in content.items():
        for index, each in enumerate(value) if isinstance(value, list) else ((None, value),):
            if isinstance(each, str) and not _is_encodable(each):
                return field, field if index is None else f"{field}[{index}]"
    return None


def _is_encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
