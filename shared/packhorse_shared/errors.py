"""The error tree. Each error builds its own message from facts: what was wrong, the number, the limit, the setting's name,
and what to do. Asserts are for our bugs; these are for everybody else's."""

from __future__ import annotations

EXIT_CANNOT_START = 3
"""Exit status of a process that cannot start whatever is tried again: supervisord does not restart it."""


class PackhorseError(Exception):
    """Root of every error that Packhorse raises on purpose."""


class SettingsError(PackhorseError):
    """A setting that cannot be used. The message is one line that names the setting."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name}: {problem}")
        self.name = name


class CannotStartError(PackhorseError):
    """A process cannot start and a restart would not help: a missing model file, a port in use, a foreign run directory."""


class MalformedMessageError(PackhorseError):
    """Bytes on a socket that are not a message of this protocol. They are counted, logged and dropped."""


class OtherVersionError(MalformedMessageError):
    """A hello of another version of the protocol: of its fields only the version can be read."""

    def __init__(self, version: int) -> None:
        super().__init__(f"a hello of protocol {version}")
        self.version = version


class ModelFilesError(CannotStartError):
    """A model folder that lacks what it needs, or says what cannot be served. The message names the file."""
