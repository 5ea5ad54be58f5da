"""Programs that run in model pods, under the engine image's own Python: standard library only.

They come into the pods by a config map; `text` is what goes in there.
"""

from __future__ import annotations

from importlib.resources import files


def text(name: str) -> str:
    """The source of one of them, as `drain.py`."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
