"""Values of flags that several commands have: each as it is meant, or what argparse says is wrong with it."""

from __future__ import annotations

import argparse
import json
import math
import re
from pathlib import Path
from typing import Any


def host(text: str) -> str:
    from tandem.config.engines import listening_host

    try:
        return listening_host(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (1 to 65535)")
    return int(text)


def engine(text: str) -> str:
    """An engine as the router's flags have it."""
    from tandem.config import engine_spec

    try:
        return engine_spec(text).text
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0")
    return value


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number greater than 0")
    return int(text)


def namespace(text: str) -> str:
    """A namespace's name, as Kubernetes takes it."""
    from tandem.api.validation.metadata import is_namespace

    if not is_namespace(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no namespace's name: at most 63 lower-case letters, digits and '-', with a letter "
            "or digit at both ends"
        )
    return text


def image(text: str) -> str:
    if not text or re.search(r"\s|://", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no image's name, as registry.example/router:1.0")
    return text


def region(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9-]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no AWS region's name, as us-east-2")
    return text


def url(text: str) -> str:
    if not re.fullmatch(r"https?://[^\s/]\S*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no URL that begins with http:// or https://")
    return text


MOST_CONFIG_BYTES = 4 << 20
"""Of a model's config.json; usual ones have some thousand."""


def model_config(path: Path) -> dict[str, Any]:
    """A model's config.json. Raises OSError, or ValueError where the file is none."""
    with path.open("rb") as file:
        data = file.read(MOST_CONFIG_BYTES + 1)
    if len(data) > MOST_CONFIG_BYTES:
        raise ValueError(f"{path}: is larger than {MOST_CONFIG_BYTES >> 20} MiB; no config.json is")
    try:
        config = json.loads(data.decode("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: is not JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"{path}: is not JSON that can be read: it is nested too deeply") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: is not a model's config.json: it holds no object")
    return config
