"""Why a request goes where it goes, as told to those who ask."""

from __future__ import annotations

from typing import Any

from tandem.router.engines import Engine
from tandem.router.job import Job
from tandem.router.strategies import Choice

_SHOWN = 8


def explanation(job: Job, decoder: Engine, threshold: int) -> dict[str, str]:
    """Names and values, without those that say nothing, for response headers: printable ASCII."""
    told: dict[str, object] = {
        "path": job.path.value,
        "reason": str(job.reason),
        "prompt-tokens": job.prompt.tokens,
        "effective-tokens": job.effective_tokens if job.effective_tokens != job.prompt.tokens else None,
        "threshold": threshold,
        "prefill-url": job.prefiller.url if job.prefiller is not None else None,
        "prefill-ms": f"{job.prefill_seconds * 1000:.1f}" if job.prefill_seconds is not None else None,
        "decode-url": decoder.url,
    }
    for role, choice in (("prefill", job.prefill_choice), ("decode", job.decode_choice)):
        if choice is not None:
            told[f"{role}-expected-hit"] = choice.hit_tokens
            told[f"{role}-why"] = choice.why
            told[f"{role}-scores"] = scores(choice) or None
    return {name: _printable(str(value)) for name, value in told.items() if value is not None}


def _printable(text: str) -> str:
    return "".join(char if " " <= char <= "~" else "?" for char in text)


def scores(choice: Choice) -> str:
    """The engines that were compared, the best first; of many the best few."""
    best = sorted(choice.scores.items(), key=lambda pair: pair[1])
    return ", ".join(f"{url}={score:.0f}" for url, score in best[:_SHOWN])


def as_json(choice: Choice | None) -> dict[str, Any] | None:
    """A choice for the admin port."""
    if choice is None:
        return None
    return {
        "url": choice.engine.url,
        "why": choice.why,
        "expectedHitTokens": choice.hit_tokens,
        "rank": choice.rank,
        "scores": dict(sorted(choice.scores.items(), key=lambda pair: pair[1])),
    }
