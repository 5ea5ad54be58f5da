"""One choice of an answer as it grows: tokens to text, stop strings, what is held back for them."""

from __future__ import annotations

from tandem.sim.protocol import Wanted
from tandem.sim.render import Piece
from tandem.sim.request import Finish, Output, SimRequest
from tandem.sim.vocabulary import Vocabulary


class Choice:
    """Turns a request's outputs into pieces. `stopped` is set when a stop string ended it: the engine is to
    be told."""

    def __init__(self, index: int, request: SimRequest, wanted: Wanted, vocabulary: Vocabulary) -> None:
        self.index = index
        self.request = request
        self.tokens: list[int] = []
        self.text = ""
        self.finish: str | None = None
        self.stop_reason: int | str | None = None
        self.stopped = False
        self._wanted = wanted
        self._vocabulary = vocabulary
        self._sent = 0
        self._named = 0  # characters of the tokens reported with logprobs
        # A stop string may begin within what has come, so that much is held back.
        self._held = 0 if wanted.include_stop else max(map(len, wanted.stop), default=1) - 1

    @property
    def done(self) -> bool:
        return self.finish is not None

    def feed(self, output: Output) -> Piece:
        """The next token, or the end without one."""
        tokens = [] if output.token is None else [output.token]
        before = self.request.prompt[-8:] + self.tokens[-8:]
        if output.finish is not None:
            self.finish, self.stop_reason = output.finish.value, output.stop_reason
        if output.token is not None:
            self.tokens.append(output.token)
            if output.finish is not Finish.STOP or self._wanted.include_stop:
                self.text += self._text(output.token)
            self._look_for_stop(output.token)
        end = len(self.text) if self.done or not self._wanted.stop else len(self.text) - self._held
        text = self.text[self._sent : max(end, self._sent)]
        self._sent += len(text)
        piece = Piece(self.index, text, tokens, before, self.finish, self.stop_reason, offset=self._named)
        if self._wanted.logprobs is not None and tokens:
            self._named += len(self._vocabulary.text(tokens[0]))
        return piece

    def whole(self) -> Piece:
        """All of it."""
        return Piece(
            self.index,
            self.text,
            self.tokens,
            self.request.prompt[-8:],
            self.finish,
            self.stop_reason,
            prompt=self.request.prompt,
        )

    def _text(self, token: int) -> str:
        if self._wanted.skip_special_tokens:
            return self._vocabulary.text(token)
        return self._vocabulary.decode([token], skip_special=False)

    def _look_for_stop(self, token: int) -> None:
        if not self._wanted.stop or len(self.tokens) <= self._wanted.min_tokens:
            return
        start = max(0, len(self.text) - len(self._text(token)) - max(map(len, self._wanted.stop)))
        for stop in self._wanted.stop:
            at = self.text.find(stop, start)
            if at >= 0:
                self.text = self.text[: at + len(stop)] if self._wanted.include_stop else self.text[:at]
                self.stopped = self.finish is None
                self.finish, self.stop_reason = Finish.STOP.value, stop
                return
