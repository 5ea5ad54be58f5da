"""Objects as a YAML file for people: a comment before each, long texts in blocks."""

from __future__ import annotations

import textwrap
from typing import Any

import yaml

from tandem.api.problem import one_line
from tandem.operator.names import SIZES_ANNOTATION
from tandem.operator.render import Rendering


def document(rendering: Rendering, title: str) -> str:
    """What `kubectl apply -f -` takes; `title` says what it was made of."""
    head = [title, *rendering.notes]
    parts = ["".join(f"# {one_line(line)}\n" for line in head)]
    for made in rendering.objects:
        metadata = made["metadata"]
        where = f"{metadata['namespace']}/" if "namespace" in metadata else ""
        comment = f"# {made['kind']} {where}{metadata['name']}\n"
        reasons = metadata.get("annotations", {}).get(SIZES_ANNOTATION, "")
        comment += "".join(_wrapped(line) for line in reasons.splitlines())
        text = yaml.dump(
            made, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=False
        )
        parts.append(comment + text)
    return "---\n".join(parts)


def _wrapped(line: str) -> str:
    return textwrap.fill(one_line(line), 118, initial_indent="#   ", subsequent_indent="#     ") + "\n"


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as blocks; no anchors for what occurs twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
