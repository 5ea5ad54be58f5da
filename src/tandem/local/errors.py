"""What stops a local endpoint, in words for the person at the terminal."""

from __future__ import annotations


class LocalError(Exception):
    """This machine lacks something; the message says what, and what to do."""


class ResourceError(LocalError):
    """The resource, or the command line, asks for what a local endpoint cannot do."""


class ProcessDied(LocalError):
    """A process of the endpoint ended by itself; the message has the cause and the log's path."""
