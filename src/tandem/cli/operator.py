"""`tandem operator`: runs endpoints on Kubernetes."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
from pathlib import Path

from tandem.cli import ENVIRONMENT, OK, complain
from tandem.cli.flags import port
from tandem.cli.render import add_settings, settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_settings(parser)
    parser.set_defaults(region=os.environ.get("AWS_REGION") or None)
    parser.add_argument(
        "--kubeconfig", type=Path, help="the cluster; default: the pod's own, $KUBECONFIG or ~/.kube/config"
    )
    parser.add_argument("--context", help="a context of the kubeconfig")
    parser.add_argument(
        "--leader-elect",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="work only while holding the lease, so that replicas may stand by (default)",
    )
    parser.add_argument(
        "--lease-seconds",
        type=_seconds,
        default=15,
        metavar="SECONDS",
        help="after so long another takes over from an operator that died (3 to 600, default 15)",
    )
    parser.add_argument(
        "--take-over", action="store_true", help="work although the definition or an operator is not Tandem's"
    )
    for name, usual, what in (
        ("health", 8081, "/healthz and /readyz"),
        ("metrics", 8080, "/metrics"),
        ("webhook", 9443, "webhooks, over TLS; 0: none"),
    ):
        parser.add_argument(
            f"--{name}-port", type=_port, default=usual, help=f"port of {what} (default {usual})"
        )
    parser.add_argument(
        "--webhook-service", metavar="NAME", help="Service by which API servers reach webhooks"
    )
    parser.add_argument(
        "--webhook-certificates",
        type=Path,
        metavar="FOLDER",
        help="tls.crt and tls.key, as cert-manager mounts them; default: the operator makes its own",
    )
    parser.add_argument("--log-level", choices=("debug", "info", "warning"), default="info")


def run(arguments: argparse.Namespace) -> int:
    from tandem.kube import KubeError, NoCluster
    from tandem.operator.process.alone import NotAlone
    from tandem.operator.process.run import OperatorConfig
    from tandem.operator.process.run import run as operate

    logging.basicConfig(
        level=arguments.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    try:
        given = {"webhook_service": arguments.webhook_service} if arguments.webhook_service else {}
        config = OperatorConfig(
            settings=settings(arguments),
            kubeconfig=arguments.kubeconfig,
            context=arguments.context,
            leader_elect=arguments.leader_elect,
            lease_seconds=arguments.lease_seconds,
            take_over=arguments.take_over,
            health_port=arguments.health_port,
            metrics_port=arguments.metrics_port,
            webhook_port=arguments.webhook_port or None,
            webhook_certificates=arguments.webhook_certificates,
            **given,
        )
        asyncio.run(operate(config))
    except NoCluster as error:
        complain(f"no cluster: {error}")
        return ENVIRONMENT
    except (KubeError, NotAlone, OSError, ValueError) as error:
        complain(error)
        return ENVIRONMENT
    return OK


def _seconds(text: str) -> int:
    if not text.isdecimal() or not 3 <= int(text) <= 600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 3 to 600")
    return int(text)


def _port(text: str) -> int:
    return 0 if text == "0" else port(text)
