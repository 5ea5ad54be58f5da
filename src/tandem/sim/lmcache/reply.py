"""What a request's answer carries of LMCache."""

from __future__ import annotations

import logging

from tandem.sim.handoff import Host
from tandem.sim.request import SimRequest

logger = logging.getLogger("tandem.sim")


def reply(request: SimRequest, host: Host) -> None:
    """Fill in `kv_reply` of a request that ended. With `ret_first_tok`, whatever its value, LMCache looks for
    the first token even if there is none, and the engine dies of that."""
    if "ret_first_tok" not in (request.kv_params or {}):
        return
    if request.generated:
        request.kv_reply = {"first_tok": request.tokens[request.prompt_length]}
    else:
        logger.error("IndexError: list index out of range, in LMCache's request_finished")
        host.crash()
