"""How long the stages of a request took: for its answer's headers, for metrics and for traces."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Timing:
    """Moments are by ``time.monotonic``: the event loop's own clock counts milliseconds. None: a stage that was not reached."""

    tokenize_began: float | None = None
    tokenize_s: float = 0.0
    asked_at: float | None = None
    """When the broker was asked."""
    answered_at: float | None = None
    queue_ms: float = 0.0
    """Longest wait of any of its inputs."""
    encode_ms: float = 0.0
    """Longest forward pass of any of its inputs."""
    inputs: int = 0
    tokens: int = 0

    def headers(self) -> list[tuple[bytes, bytes]]:
        """What the answer says of them, in milliseconds."""
        return [
            (b"x-packhorse-queue-ms", b"%.3f" % self.queue_ms),
            (b"x-packhorse-tokenize-ms", b"%.3f" % (1000 * self.tokenize_s)),
            (b"x-packhorse-encode-ms", b"%.3f" % self.encode_ms),
        ]
