"""What stops a local endpoint, in words for the person at the terminal."""

from __future__ import annotations

from collections.abc import Sequence


class LocalError(Exception):
    """This machine lacks something; the message says what, and what to do."""


class ResourceError(LocalError):
    """The resource, the command line or the model asks for what a local endpoint cannot do."""


class ProcessDied(LocalError):
    """A process of the endpoint ended by itself; the message has the cause and the log's path."""


class SeveralErrors(LocalError):
    """Several things keep an endpoint from starting; all are told at once."""

    def __init__(self, errors: Sequence[LocalError]) -> None:
        self.errors = tuple(errors)
        told = "".join(f"\n- {error}" for error in errors)
        super().__init__(f"{len(errors)} things keep the endpoint from starting:{told}")


def raise_all(errors: Sequence[LocalError]) -> None:
    """Raise what was found: one as it is, several as SeveralErrors; nothing where there is none."""
    if len(errors) > 1:
        raise SeveralErrors(errors)
    for error in errors:
        raise error
