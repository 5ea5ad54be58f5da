"""Running the resource on Kubernetes: every object that an endpoint needs, rendered by pure functions."""

from tandem.operator.document import document
from tandem.operator.errors import RenderError
from tandem.operator.render import Rendering, render
from tandem.operator.settings import Settings

__all__ = ["RenderError", "Rendering", "Settings", "document", "render"]
