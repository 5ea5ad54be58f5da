"""One request on its way through the router: what is known of it, and what was decided."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from tandem.http import Request, StreamScan
from tandem.router.answer import Answer
from tandem.router.body import Body
from tandem.router.classify import Api
from tandem.router.engines import Engine
from tandem.router.keys import Caller
from tandem.router.legs import Reply
from tandem.router.reported import NO_USAGE, Usage
from tandem.router.strategies import Choice, Prompt

_LARGE = 64 * 1024
"""Bytes of a body that is let go of while its answer is streamed."""


class Path(StrEnum):
    """Which engines serve a request."""

    DISAGGREGATED = "disaggregated"
    DECODE_ONLY = "decode_only"


class Reason(StrEnum):
    """Why a request takes its path; what `classify.why_decode_only` names comes beside these."""

    UNDECIDED = "undecided"
    SHORT = "short"
    CACHED = "cached"  # long, but the decoder has most of it in its cache
    THRESHOLD = "threshold"
    OVER_CONTEXT = "over_context"  # no engine can serve it, and the decoder's own error says so
    NO_PREFILLERS_CONFIGURED = "no_prefillers_configured"
    # The rest are long prompts that a decoder must compute after all.
    DOUBTFUL = "doubtful"  # the decode leg would probably be rejected
    OVER_STEP = "over_step"  # longer than what a prefiller can hand over
    OVER_BUFFER = "over_buffer"  # larger than what a decoder can receive
    NO_ROOM = "no_room"  # decoders could not receive it in time
    NO_PREFILLER = "no_prefiller"
    PREFILL_FAILED = "prefill_failed"
    PREFILL_REJECTED = "prefill_rejected"
    HANDOFF_FAILED = "handoff_failed"


@dataclass(slots=True)
class Job:
    request: Request
    answer: Answer
    api: Api
    body: Body
    id: str
    arrived: float
    explain: bool
    prompt: Prompt = field(default_factory=Prompt)
    path: Path = Path.DECODE_ONLY
    reason: str = Reason.UNDECIDED
    fallback: bool = False
    """Whether a decoder computes a prompt that belongs on a prefiller."""
    prefiller: Engine | None = None
    prefill_seconds: float | None = None
    model: str | None = None
    """The model that it names."""
    caller: Caller | None = None
    """Whose it is; None: there are no API keys."""
    effective_tokens: int | None = None
    """What was compared with the threshold; None: not counted."""
    expected_output: int = 0
    """Tokens that its answer may have."""
    decode_choice: Choice | None = None
    prefill_choice: Choice | None = None
    prefills: int = 0
    """Prefill legs sent so far."""
    decodes: int = 0
    """Decode legs sent so far."""
    longest: int | None = None
    """Tokens of the longest prompt that an engine takes."""
    scan: StreamScan | None = None
    """What is seen of its answer, where that is streamed."""
    usage: Usage = NO_USAGE
    """What an answer that is not streamed says of its tokens."""
    rejection: Reply | None = None
    """A prefiller's answer that the request itself is at fault."""
    failed_prefillers: set[Engine] = field(default_factory=set)
    failed_decoders: set[Engine] = field(default_factory=set)
    doubted_prefillers: set[Engine] = field(default_factory=set)
    """Whose KV a decoder failed with: perhaps by their fault, so others are tried first."""

    _size: int | None = field(default=None, init=False)
    """Bytes of its body, where that has been let go of."""

    @property
    def size(self) -> int:
        """Bytes of its body."""
        return len(self.request.body) if self._size is None else self._size

    def answer_begun(self) -> None:
        """No leg will be sent any more, so nobody needs a large body."""
        if self.size > _LARGE:
            self._size = self.size
            self.request.drop_body()
            self.body.drop()

    @property
    def tokens(self) -> int:
        """Tokens of the prompt; where they were not counted, at least as many as it has in plain text."""
        if self.prompt.tokens is not None:
            return self.prompt.tokens
        most = self.size
        return most if self.longest is None else min(most, self.longest)

    @property
    def most_tokens(self) -> int:
        """What all its prompts have at most, where it has several."""
        return self.size if self.reason == "prompt_list" else self.tokens

    def used(self) -> Usage:
        """What its answer says of its tokens. A stream that does not say has about as many as events."""
        if self.scan is None:
            return self.usage
        told = Usage.of(self.scan.usage)
        if told.generated is not None:
            return told
        silent = 1 if self.api is Api.CHAT else 0  # the role comes in one of its own
        return Usage(told.prompt, max(0, self.scan.events - silent))

    @property
    def max_tokens(self) -> int | None:
        """How long its answer may be, where it says so."""
        for name in ("max_completion_tokens", "max_tokens"):
            if isinstance(given := self.body.get(name), int):
                return max(0, given)
        return None

    @staticmethod
    def rank(choice: Choice | None) -> int | None:
        """The data-parallel rank that has what of the prompt its engine is expected to have; None: any, or it
        has only one."""
        if choice is None or not choice.hit_tokens:
            return None
        events = choice.engine.kv_events
        return choice.rank if events is not None and events.ranks > 1 else None

    def fall_back(self, reason: Reason) -> None:
        self.path, self.reason, self.fallback = Path.DECODE_ONLY, reason, True
        self.prefiller = self.prefill_seconds = None
