"""The description of the API as OpenAPI 3.1, made from the table of operations and the types that check requests.

https://spec.openapis.org/oas/v3.1.0
"""

from __future__ import annotations

from typing import Any

import msgspec

from packhorse_frontend.api.operations import JSON, OPERATIONS, Operation
from packhorse_frontend.api.rules import Schema, Served, require, tighten
from packhorse_frontend.problems import ErrorAnswer
from packhorse_shared import __version__

_COMPONENTS = "#/components"
_REFUSALS = {
    400: ("InvalidRequest", "The request is at fault: `message` says what is wrong, `param` names the field."),
    401: ("WrongKey", "No API key, or a wrong one."),
    404: ("NotFound", "There is no such path, or no such model: `code` is `model_not_found`."),
    408: ("TooSlow", "The request did not arrive in time (--receive_timeout). The connection ends."),
    413: ("TooLarge", "The body is larger than --max_body_bytes."),
    415: ("UnknownCoding", "The body's content-encoding is neither gzip nor identity."),
    429: ("Overloaded", "The queue is full, or the wait would outlast --request_timeout. Come back after `retry-after`."),
    431: ("HeadTooLarge", "The request's head is larger than 16 KiB. The connection ends."),
    500: ("ServerFault", "The model failed on this input, or the server has a fault."),
    503: ("Unavailable", "The server loads, stops, or has no worker. Come back after `retry-after`."),
    504: ("TimeOut", "The request was not done within --request_timeout."),
}
_HINTED = (429, 503)
_HEADERS: dict[str, Schema] = {
    "x-request-id": {
        "description": "The caller's own id, where it sent a sane one, else a new one. Logs name it.",
        "required": True,
        "schema": {"type": "string"},
    },
    "retry-after": {
        "description": "Seconds after which to try again.",
        "required": True,
        "schema": {"type": "integer", "minimum": 1},
    },
    "x-packhorse-queue-ms": {
        "description": "Longest wait of any of its inputs for a worker, in milliseconds.",
        "schema": {"type": "number", "minimum": 0},
    },
    "x-packhorse-tokenize-ms": {
        "description": "Time that its texts took to tokenize, in milliseconds.",
        "schema": {"type": "number", "minimum": 0},
    },
    "x-packhorse-encode-ms": {
        "description": "Longest forward pass that any of its inputs was in, in milliseconds.",
        "schema": {"type": "number", "minimum": 0},
    },
}
_ABOUT = (
    "One OpenAI-compatible endpoint for encoder models. Bodies are JSON. Every answer that is not 2xx has the body "
    '`{"error": {"message", "type", "param", "code"}}`; every answer carries `x-request-id`. Unknown fields are ignored, '
    "null means absent, and a known field of a wrong type is refused by its name; 1.0 does not pass for an integer. Paths work "
    "with and without a trailing slash. A body may be gzip."
)


def make_document(served: Served) -> dict[str, Any]:
    """The whole description, fit to be written as JSON."""
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Packhorse", "version": __version__, "description": _ABOUT},
        "servers": [{"url": served.root_path.rstrip("/") or "/"}],
        "tags": [{"name": name} for name in dict.fromkeys(operation.group for operation in OPERATIONS)],
        "paths": _paths(served),
        "components": {"schemas": _schemas(served), "headers": _HEADERS, "responses": _refusals()},
    }
    if served.needs_key:
        document["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"bearer": []}]
    return document


def _paths(served: Served) -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        for path in operation.paths:
            paths.setdefault(path, {})[operation.method.lower()] = _describe(operation, path, served)
    return paths


def _describe(operation: Operation, path: str, served: Served) -> dict[str, Any]:
    first = operation.paths[0]
    described: dict[str, Any] = {
        "operationId": operation.name if path == first else f"{operation.name}Alias",
        "tags": [operation.group],
        "summary": operation.summary,
        "description": _words(operation, served) if path == first else f"The same as {first}.",
        "responses": _responses(operation, served),
    }
    if path != first:
        described["x-alias-of"] = first
    if served.needs_key and operation.is_open:
        described["security"] = []
    if "{name}" in path:
        described["parameters"] = [
            {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}, "example": served.names[0]}
        ]
    if operation.request is not None:
        example = {"model": served.names[0], **operation.example}
        body = {"schema": _reference(_request_name(operation)), "example": example}
        described["requestBody"] = {"required": True, "content": {JSON: body}}
    return described


def _words(operation: Operation, served: Served) -> str:
    """The description; and whether the served model is one that it is for."""
    model = served.model
    if model is None or not operation.tasks or model.task in operation.tasks:
        return operation.description
    return f"{operation.description} The served model, {served.names[0]} (task {model.task}), answers 400 `wrong_task` here."


def _responses(operation: Operation, served: Served) -> dict[str, Any]:
    headers = {name: {"$ref": f"{_COMPONENTS}/headers/{name}"} for name in ("x-request-id", *operation.headers)}
    schema = {"type": "string"} if operation.answer is None else _answer_schema(operation.answer)
    content = {media_type: {"schema": schema} for media_type in operation.media_types}
    statuses = sorted({*operation.statuses, *(() if operation.is_open or not served.needs_key else (401,))})
    refused = {str(status): {"$ref": f"{_COMPONENTS}/responses/{_REFUSALS[status][0]}"} for status in statuses}
    return {"200": {"description": "Done.", "headers": headers, "content": content}, **refused}


def _answer_schema(answer: Any) -> Schema:
    return _reference(answer.__name__) if _is_struct(answer) else {"type": "object"}


def _refusals() -> dict[str, Any]:
    content = {JSON: {"schema": _reference(ErrorAnswer.__name__)}}
    return {
        name: {
            "description": words,
            "headers": {
                header: {"$ref": f"{_COMPONENTS}/headers/{header}"}
                for header in ("x-request-id", *(("retry-after",) if status in _HINTED else ()))
            },
            "content": content,
        }
        for status, (name, words) in _REFUSALS.items()
    }


def _schemas(served: Served) -> dict[str, Schema]:
    """All types that the operations name, by name: requests with all their rules, answers with all that is always there."""
    template = f"{_COMPONENTS}/schemas/{{name}}"
    answers = [operation.answer for operation in OPERATIONS if _is_struct(operation.answer)]
    _, schemas = msgspec.json.schema_components([*answers, ErrorAnswer], ref_template=template)
    for schema in schemas.values():
        _promise_all(schema)
    for operation in OPERATIONS:
        if operation.request is not None:
            _, found = msgspec.json.schema_components([operation.request], ref_template=template)
            schema = found.pop(operation.request.__name__)
            name = _request_name(operation)
            tighten(schema, name, served)
            require(schema, operation.required)
            schemas |= {**found, name: {**schema, "title": name}}
    return dict(sorted(schemas.items()))


def _promise_all(schema: Schema) -> None:
    """Of an answer all is there that has a default, too: only what is unset is left out, and that has none."""
    fields = schema.get("properties", {})
    schema["required"] = [
        name for name, field in fields.items() if field.pop("default", None) is not None or name in schema["required"]
    ]


def _is_struct(answer: Any) -> bool:
    return isinstance(answer, type) and issubclass(answer, msgspec.Struct)


def _request_name(operation: Operation) -> str:
    assert operation.request is not None
    return operation.variant or operation.request.__name__


def _reference(name: str) -> Schema:
    return {"$ref": f"{_COMPONENTS}/schemas/{name}"}
