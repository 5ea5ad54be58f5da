"""Mistakes in vLLM's flags that can be told without vLLM: values it never takes, flags that exclude one
another."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tandem.api.crd.structural import Location
from tandem.api.validation import Found
from tandem.api.validation.subject import location
from tandem.engine.args import MOST, Setting, int_value, settings, switch
from tandem.engine.roles import Source

_WHOLE = {
    "--block-size": 1,
    "--data-parallel-size": 1,
    "--max-num-seqs": 1,
    "--nnodes": 1,
    "--pipeline-parallel-size": 1,
    "--port": 1,
    "--tensor-parallel-size": 1,
}
"""Flags whose value is a whole number in digits, and the least."""
_SHORTHAND = ("--max-model-len", "--max-num-batched-tokens")
"""Flags whose value may also be 8k or 8K."""
_CHOICES = {
    "--chat-template-content-format": ("auto", "openai", "string"),
    "--dtype": ("auto", "bfloat16", "float", "float16", "float32", "half"),
}
_JSON = (
    "--default-chat-template-kwargs",
    "--kv-events-config",
    "--kv-transfer-config",
    "--speculative-config",
)
_FRACTION = "--gpu-memory-utilization"
_TOGETHER = re.compile(r"(--?[A-Za-z][\w.-]*)\s+(\S.*)", re.DOTALL)


@dataclass(frozen=True)
class Flags:
    """The flags of one kind of engine, and where in the resource each stands."""

    args: tuple[str, ...]
    """All tokens, weakest source first: of a flag given several times the last counts."""
    places: tuple[Location, ...]
    """Of each token."""
    resources: str
    """The path of what the engine's container asks for."""

    @classmethod
    def of(cls, sources: Sequence[tuple[Source, int]], resources: str) -> Flags:
        """From the fields that hold flags, each with the number of its words before them."""
        tokens = [
            (token, location(source.path, before + i))
            for source, before in sources
            for i, token in enumerate(source.args)
        ]
        return cls(tuple(t for t, _ in tokens), tuple(at for _, at in tokens), resources)

    def last(self, flag: str) -> tuple[Setting, Location] | None:
        """The setting of a flag that counts, and where it stands."""
        found, token = None, 0
        for setting in settings(self.args):
            if setting.flag == flag:
                found = setting, self.places[token]
            token += len(setting.tokens)
        return found

    def number(self, flag: str) -> int | None:
        """The flag's value where it is a good one."""
        try:
            return int_value(self.args, flag)
        except ValueError:
            return None

    def size(self, flag: str) -> int:
        """A number of parallel parts: 1 where none is given."""
        return self.number(flag) or 1


def flag_findings(flags: Flags) -> Iterator[Found]:
    for token, at in zip(flags.args, flags.places, strict=True):
        if match := _TOGETHER.fullmatch(token):
            yield Found(
                "IEC403", at, f"{token!r} is one word to vLLM; write {match[1]!r}, {match[2]!r} as two items"
            )
    for flag in (*_WHOLE, *_SHORTHAND, *_CHOICES, *_JSON, _FRACTION):
        last = flags.last(flag)
        if last is not None and not last[0].path and not last[0].negated:
            yield from _value(flag, *last)
    yield from _together(flags)


def _value(flag: str, setting: Setting, at: Location) -> Iterator[Found]:
    if any(_TOGETHER.fullmatch(token) for token in setting.tokens):
        return  # told already
    values = setting.values
    if not values or values == ("",):
        yield Found("IEC402", at, f"{flag} has no value; put one after it")
    elif what := _wrong(flag, values[0]):  # what comes after it may be the model
        yield Found("IEC401", at, f"{flag} {what} (it is {values[0]!r})")


def _wrong(flag: str, value: str) -> str | None:
    """What a value should be, where it is not that."""
    if flag in _WHOLE:
        ok = bool(re.fullmatch(r"\+?[0-9]{1,18}", value)) and _WHOLE[flag] <= int(value) <= MOST
        return None if ok else f"must be a whole number, at least {_WHOLE[flag]}, in digits"
    if flag in _SHORTHAND:
        try:
            number = int_value([flag, value], flag)
        except ValueError:
            return "must be a number of tokens, as 16384 or 16k"
        if number is None:
            return None if flag == "--max-model-len" else "must be a number of tokens, as 16384 or 16k"
        return None if number >= 1 else "must be at least 1"
    if flag in _CHOICES:
        return None if value in _CHOICES[flag] else f"must be one of {', '.join(_CHOICES[flag])}"
    if flag in _JSON:
        try:
            return None if isinstance(json.loads(value), dict) else "must be a JSON object"
        except (ValueError, RecursionError):
            return "must be a JSON object"
    try:
        return None if 0 < float(value) <= 1 else "must be a share above 0 and up to 1, as 0.9"
    except ValueError:
        return "must be a share above 0 and up to 1, as 0.9"


def _together(flags: Flags) -> Iterator[Found]:
    batched = flags.number("--max-num-batched-tokens")
    sequences, length = flags.number("--max-num-seqs"), flags.number("--max-model-len")
    last = flags.last("--max-num-batched-tokens")
    if batched is None or last is None:
        return
    if sequences is not None and batched < sequences:
        yield Found(
            "IEC404",
            last[1],
            f"--max-num-batched-tokens ({batched}) must be at least --max-num-seqs ({sequences})",
        )
    if length is not None and batched < length and switch(flags.args, "--enable-chunked-prefill") is False:
        yield Found(
            "IEC404",
            last[1],
            f"--max-num-batched-tokens ({batched}) must be at least --max-model-len ({length}) where "
            "--no-enable-chunked-prefill is set: a prompt is computed in one step",
        )
