"""`tandem render`: every Kubernetes object of an endpoint, for `kubectl apply -f -`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.cli import ENVIRONMENT, USAGE, complain, emit
from tandem.cli.flags import image, model_config, namespace, region, url

if TYPE_CHECKING:
    from tandem.api import Endpoint
    from tandem.operator import Settings

STDIN = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-f",
        "--file",
        required=True,
        help="manifest of an InferenceEndpointConfig, or - for standard input",
    )
    parser.add_argument("-n", "--namespace", type=namespace, help="namespace of a manifest that names none")
    add_settings(parser)
    parser.add_argument("--json", action="store_true", help="print a List in JSON; notes go to stderr")


def add_settings(parser: argparse.ArgumentParser) -> None:
    """What is the same for all endpoints of a cluster; `tandem operator` has it too."""
    parser.add_argument(
        "--system-namespace",
        type=namespace,
        help="where the router goes (default hyperpod-inference-system)",
    )
    for name, what in (
        ("router", "the router (default: that of this version)"),
        ("proxy", "the reverse proxy: nginx without root"),
        ("collector", "the OpenTelemetry collector"),
    ):
        parser.add_argument(f"--{name}-image", type=image, help=f"image of {what}")
    parser.add_argument("--region", type=region, help="AWS region, where the manifest does not name one")
    parser.add_argument(
        "--remote-write-url",
        type=url,
        metavar="URL",
        help="Prometheus that collectors write to, besides being scraped",
    )
    parser.add_argument(
        "--workers-as-root",
        action="store_true",
        help="run model containers as their image says, with a writable root",
    )
    parser.add_argument(
        "--model-config",
        type=Path,
        metavar="FILE",
        help="the model's config.json, to size its KV cache by; else its name or an upper bound counts",
    )


def run(arguments: argparse.Namespace) -> int:
    from tandem.api import InvalidResource
    from tandem.api.load import parse_endpoint
    from tandem.api.problem import one_line
    from tandem.engine.validation import validate_text
    from tandem.operator import RenderError, document, render

    source = "<stdin>" if arguments.file == STDIN else arguments.file
    try:
        chosen = settings(arguments)
        text = _text(arguments.file)
        if errors := validate_text(text, source, model_config=chosen.model_config).errors:
            for error in errors:
                complain(error)
            return USAGE
        endpoint, raw = parse_endpoint(text, source=source)
    except OSError as error:
        complain(one_line(f"{error.filename}: {error.strerror}"))
        return ENVIRONMENT
    except InvalidResource as error:
        for problem in error.problems:
            complain(one_line(f"{source}: {problem}"))
        return USAGE
    except ValueError as error:
        complain(one_line(str(error)))
        return USAGE
    if arguments.namespace and not (own := raw["metadata"].get("namespace")):
        endpoint = _placed(endpoint, arguments.namespace)
    elif arguments.namespace and own != arguments.namespace:
        complain(f"--namespace {arguments.namespace}: not used, as the manifest says namespace: {own}")
    try:
        rendering = render(endpoint, chosen)
    except RenderError as error:
        complain(one_line(f"{source}: {error}"))
        return USAGE
    if arguments.json:
        for note in rendering.notes:
            complain(one_line(note))
        objects = {"apiVersion": "v1", "kind": "List", "items": list(rendering.objects)}
        return emit(json.dumps(objects, indent=2) + "\n")
    metadata = endpoint.metadata
    title = f"Endpoint {metadata.namespace}/{metadata.name}, rendered from {Path(source).name}"
    return emit(document(rendering, title))


def _text(name: str) -> str:
    """A manifest's text. Raises OSError, or ValueError where it is none."""
    from tandem.api.load import manifest_text
    from tandem.api.validation.manifest import MOST_BYTES, file_text

    if name != STDIN:
        return manifest_text(Path(name))
    try:
        return file_text(sys.stdin.buffer.read(MOST_BYTES + 1))
    except ValueError as error:
        raise ValueError(f"standard input: {error}") from None


def settings(arguments: argparse.Namespace) -> Settings:
    """Raises OSError, or ValueError for a config.json that is none."""
    from tandem.operator import Settings

    names = (
        "system_namespace",
        "router_image",
        "proxy_image",
        "collector_image",
        "region",
        "remote_write_url",
        "workers_as_root",
    )
    given: dict[str, Any] = {name: getattr(arguments, name) for name in names if getattr(arguments, name)}
    if arguments.model_config is not None:
        given["model_config"] = model_config(arguments.model_config)
    return Settings(**given)


def _placed(endpoint: Endpoint, namespace: str) -> Endpoint:
    metadata = endpoint.metadata.model_copy(update={"namespace": namespace})
    return endpoint.model_copy(update={"metadata": metadata})
