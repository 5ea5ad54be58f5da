"""What UCX logs of a connection over which KV is read, where UCX_PROTO_INFO asks for it: in its form, for
those who read real engines' logs."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping

logger = logging.getLogger("tandem.sim")

VARIABLE = "UCX_PROTO_INFO"

_OPERATION = "remote memory read by ucp_get*(multi) into host memory from host"


def asked(environment: Mapping[str, str]) -> bool:
    """Whether UCX would tell of protocols."""
    return environment.get(VARIABLE, "n").lower() not in ("", "n", "no", "0", "off")


def tell(agent: str, *, local: bool) -> None:
    """Log the table: KV comes from the same process (`local`), or over a simulated network."""
    connection, lane = ("intra-node", "cma/memory") if local else ("inter-node", "tcp/eth0")
    width = len(_OPERATION)
    config = width - len("0..inf | zero-copy   | ")
    border = f"+{'-' * 8}+{'-' * 13}+{'-' * (config + 2)}+"
    head = f"[{socket.gethostname()}:{os.getpid()}:0]  "
    for line in (
        border,
        f"| {f'{agent[:31]} {connection} cfg#1':<{width}} |",
        f"| {_OPERATION} |",
        border,
        f"| Range  | Description | {'Config':^{config}} |",
        border,
        f"| 0..inf | zero-copy   | {lane:<{config}} |",
        border,
    ):
        logger.info("%s %s", head, line)
