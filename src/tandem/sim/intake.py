"""What vLLM 0.32 refuses once a request's fields have the right types: sampling parameters, lengths, ids
outside of the vocabulary."""

from __future__ import annotations

from typing import Any

from tandem.sim import schema
from tandem.sim.protocol import Wanted
from tandem.sim.refusal import Refused, parameter

_MAX_CHOICES = 16_384


def check_sampling(request: schema.Chat | schema.Completion, wanted: Wanted, max_tokens: int) -> None:
    """What vLLM's SamplingParams refuse; `max_tokens` is what the context leaves of what was asked."""
    if wanted.n < 1:
        raise Refused(f"n must be at least 1, got {wanted.n}.")
    if wanted.n > _MAX_CHOICES:
        raise Refused(
            f"n must be at most {_MAX_CHOICES}, got {wanted.n}. To increase this limit, set the "
            "VLLM_MAX_N_SEQUENCES environment variable."
        )
    if words := [key for key in request.logit_bias or () if not _is_integer(key)]:
        message = f"logit_bias contains key(s) that cannot be converted to integer token IDs: {words}"
        raise parameter(message, "logit_bias", value=words)
    _check_penalties(request)
    _check_distribution(request)
    if max_tokens < 1:
        raise parameter(f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens", value=max_tokens)
    if wanted.min_tokens < 0:
        raise Refused(f"min_tokens must be greater than or equal to 0, got {wanted.min_tokens}.")
    if wanted.min_tokens > max_tokens:
        raise Refused(
            f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {wanted.min_tokens}."
        )
    if not all(wanted.stop):
        raise Refused("stop cannot contain an empty string.")
    if not all(request.bad_words):
        raise Refused(f"bad_words cannot contain an empty string. Got bad_words={request.bad_words}")
    if wanted.greedy and wanted.n > 1:
        raise Refused(f"n must be 1 when using greedy sampling, got {wanted.n}.")


def _is_integer(text: str) -> bool:
    try:
        int(text)
    except ValueError:
        return False
    return True


def _check_penalties(request: schema.Generate) -> None:
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(request, name)
        if value is not None and not -2 <= value <= 2:
            raise Refused(f"{name} must be in [-2, 2], got {value}.")
    if (repetition := request.repetition_penalty) is not None and not repetition > 0:
        raise Refused(f"repetition_penalty must be greater than zero, got {repetition}.")


def _check_distribution(request: schema.Generate) -> None:
    temperature, top_p = request.temperature, request.top_p
    if temperature is not None and not 0 <= temperature <= 2:
        bound = "be non-negative" if temperature < 0 else "be in [0, 2]"
        message = f"temperature must {bound}, got {temperature}."
        raise parameter(message, "temperature", value=temperature)
    if top_p is not None and not 0 < top_p <= 1:
        raise parameter(f"top_p must be in (0, 1], got {top_p}.", "top_p", value=top_p)
    if request.top_k is not None and request.top_k < -1:
        raise Refused(f"top_k must be 0 (disable), or at least 1, got {request.top_k}.")
    if request.min_p is not None and not 0 <= request.min_p <= 1:
        raise Refused(f"min_p must be in [0, 1], got {request.min_p}.")


def check_intake(
    request: schema.Chat | schema.Completion, wanted: Wanted, prompt: list[int], size: int, max_logprobs: int
) -> None:
    """What vLLM refuses when the engine takes a request in, for a vocabulary of `size` tokens."""
    for name, asked in (("sample", wanted.logprobs), ("prompt", request.prompt_logprobs)):
        count = size if asked == -1 else asked or 0
        if count > max_logprobs:
            raise parameter(
                f"Requested {name} logprobs of {count}, which is greater than max allowed: {max_logprobs}",
                "logprobs" if name == "sample" else "prompt_logprobs",
                late=True,
                value=count,
            )
    _check_token_ids(request, size)
    if not prompt:
        raise Refused("The decoder prompt cannot be empty", late=True)
    if (top := max(prompt)) >= size:
        raise Refused(f"Token id {top} is out of vocabulary", late=True)


def _check_token_ids(request: schema.Generate, size: int) -> None:
    listed = {
        "logit_bias": [int(token) for token in request.logit_bias or ()],
        "stop_token_ids": request.stop_token_ids or [],
    }
    for name, tokens in listed.items():
        if outside := [token for token in tokens if not 0 <= token < size]:
            raise parameter(
                f"token_id(s) {outside} in {name} contain out-of-vocab token ids. Vocabulary size: {size}",
                name,
                late=True,
                value=outside,
            )
    allowed = request.allowed_token_ids
    if allowed == []:
        message = "allowed_token_ids is not None and empty!"
        raise parameter(message, "allowed_token_ids", late=True, value=allowed)
    if outside := [token for token in allowed or () if not 0 <= token < size]:
        message = "allowed_token_ids contains out-of-vocab token id!"
        raise parameter(message, "allowed_token_ids", late=True, value=outside)


def check_length(prompt: int, max_model_len: int, *, counted: bool) -> None:
    """Raises Refused for a prompt longer than the context. `counted`: it came as token ids; a text is only
    tokenized until it is too long."""
    if prompt > max_model_len:
        least = max_model_len + 1
        told = prompt if counted else least
        raise parameter(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
            f"{'at least ' if told == least else ''}{told} input tokens, which exceeds this limit even "
            "without any output tokens. Please reduce the length of the input prompt.",
            "input_tokens",
            value=told,
        )


def check_max_tokens(wanted: Wanted, max_model_len: int) -> None:
    if wanted.max_tokens is not None and wanted.max_tokens > max_model_len:
        raise parameter(
            f"max_tokens={wanted.max_tokens} cannot be greater than max_model_len={max_model_len}. Please "
            "request fewer output tokens.",
            "max_tokens",
            value=wanted.max_tokens,
        )


def prompts_of(prompt: Any) -> list[Any]:
    """The prompts of a completion request: texts or lists of token ids."""
    if prompt == []:
        raise Refused("You must pass at least one prompt")
    if isinstance(prompt, list) and isinstance(prompt[0], str | list):
        return prompt
    return [prompt]
