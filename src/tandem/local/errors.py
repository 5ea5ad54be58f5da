"""What stops a local endpoint, in words for the person at the terminal."""

from __future__ import annotations


class LocalError(Exception):
    """Something on this machine or in the resource must be changed first; the message says what."""
