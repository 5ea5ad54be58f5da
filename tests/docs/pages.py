"""The pages of the documentation, and what is fenced in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str, only: str = "") -> Iterator[tuple[str, str]]:
    """(page, text) of each fenced block of a language, of one page (`only`) or of all."""
    for page in PAGES:
        if only not in ("", page.name):
            continue
        for found in re.finditer(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
            yield page.name, found[1]
