"""What goes wrong, as HTTP says it: the one error envelope, and which status each kind of failure has.

Every non-2xx answer, from whatever layer, is made here::

    {"error": {"message": str, "type": str, "param": str|null, "code": str|null}}
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from packhorse_shared.messages import ErrorCode

LONGEST_RETRY_AFTER_S = 30

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 503: "overloaded_error"}
_STATUSES = {
    ErrorCode.QUEUE_FULL: 429,
    ErrorCode.WAIT_TOO_LONG: 429,
    ErrorCode.NO_WORKER: 503,
    ErrorCode.LOADING: 503,
    ErrorCode.DRAINING: 503,
    ErrorCode.TIMEOUT: 504,
    ErrorCode.INPUT_TOO_LONG: 400,
    ErrorCode.WORKER_DIED: 500,
    ErrorCode.FORWARD_FAILED: 500,
    ErrorCode.NON_FINITE_OUTPUT: 500,
    ErrorCode.OUT_OF_MEMORY: 503,
}


class ErrorBody(msgspec.Struct, frozen=True):
    """What is wrong, in OpenAI's words."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct, frozen=True):
    """The body of every answer that is not 2xx."""

    error: ErrorBody


class Problem(Exception):  # noqa: N818 (the HTTP word, as in RFC 9457)
    """A request cannot be answered with 2xx. Raised anywhere below a route, turned into the envelope by the outermost layer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        closes: bool = False,
        is_rejection: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.closes = closes
        """Whether the connection ends with this answer, since its body was not read."""
        self.is_rejection = is_rejection
        """Whether the state of the server is why, and not the request: counted by ``code`` in packhorse_rejected_total."""
        self.is_expected = False
        """Whether somebody asked just to learn this: then it is not worth a warning."""

    @property
    def type(self) -> str:
        """The envelope's ``type``."""
        return _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def body(self) -> bytes:
        """The envelope as JSON."""
        return msgspec.json.encode(ErrorAnswer(ErrorBody(_sendable(self.message), self.type, self.param, self.code)))


def invalid(message: str, param: str | None, code: str | None = None) -> Problem:
    """400: the request itself is at fault. ``param`` is the field, or None where no field is."""
    return Problem(400, message, param=param, code=code)


def unavailable(code: ErrorCode, message: str, retry_after_s: int, *, is_rejection: bool = False) -> Problem:
    """503 or 429 with a hint when to come back."""
    return Problem(
        _STATUSES[code],
        message,
        code=code.value,
        headers={"retry-after": str(max(1, retry_after_s))},
        is_rejection=is_rejection,
    )


def from_failure(code: ErrorCode, message: str, retry_after_s: int, place: tuple[str, str] | None) -> Problem:
    """What the broker said of a request, as an answer. 429 and 503 always carry a hint, others never. ``place``: how messages
    name the input that is to blame, and its field."""
    status = _STATUSES[code]
    if status in (429, 503):
        return unavailable(code, message, min(retry_after_s, LONGEST_RETRY_AFTER_S))
    label, param = place or ("", "input" if status == 400 else None)
    named = message if not label or message.startswith(label) else f"{label}: {message}"
    return Problem(status, named, param=param, code=code.value)


def _sendable(message: str) -> str:
    """Text that can be UTF-8: a message may quote a name that holds half a surrogate pair."""
    return message.encode("utf-8", "backslashreplace").decode("utf-8")
