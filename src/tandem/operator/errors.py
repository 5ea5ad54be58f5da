"""Why an endpoint cannot be rendered."""

from __future__ import annotations


class RenderError(ValueError):
    """No objects can be made of the resource; the message names the field and says what to do."""
