"""The one path that SageMaker's containers take requests at: which API a request there is for.

As vLLM's own `/invocations` has it: a body with `messages` is a chat, one with `prompt` a completion, one
with both a chat; the header `X-Amzn-SageMaker-Adapter-Identifier` names the model, whatever the body says.
Unlike there, without that header the model that the body names counts: vLLM 0.32 answers with its first one,
whatever was asked for.
"""

from __future__ import annotations

from tandem.http import Request
from tandem.router.body import Body
from tandem.router.classify import Api
from tandem.router.errors import ApiError

ADAPTER_HEADER = b"x-amzn-sagemaker-adapter-identifier"


def invoked(request: Request, body: Body) -> tuple[Api, Body]:
    """The API that a request is for, and its body as it is sent there. Raises ApiError 400 for what is for
    none that is served here."""
    if "requestType" in body:
        raise ApiError(
            400, "There are no stateful sessions here; send the whole conversation.", param="requestType"
        )
    api = _api(request, body)
    model = request.header(ADAPTER_HEADER)
    return api, body.replaced("model", model.decode("latin-1")) if model else body


def _api(request: Request, body: Body) -> Api:
    if "messages" in body:
        return Api.CHAT
    if "prompt" in body or "prompt_embeds" in body:
        return Api.COMPLETIONS
    raise ApiError(
        400,
        f"The body says by its fields which API it is for: 'messages' ({Api.CHAT}) or 'prompt' "
        f"({Api.COMPLETIONS}). It has neither, and {request.path} takes nothing else.",
    )
