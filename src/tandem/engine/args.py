"""vLLM's command line as data: reading flags, taking flags out, laying one list over another.

The rules are those of vLLM's own parser, without importing it (a test holds the two together):
`--some_flag` is `--some-flag`; `--no-x` is a setting of `--x`; `-tp` is `--tensor-parallel-size`; a value
may follow its flag or an `=`; a flag may have several values; `--config.key.sub VALUE` sets one key of a
JSON flag. A token that starts with a dash and a letter is a flag, anything else (also `-1`) a value of the
flag before it; what stands before the first flag are positionals. Abbreviated flags are not recognised.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

ALIASES = {
    "-ac": "--attention-config",
    "-asc": "--api-server-count",
    "-cc": "--compilation-config",
    "-dc": "--diffusion-config",
    "-dcp": "--decode-context-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpa": "--data-parallel-address",
    "-dpb": "--data-parallel-backend",
    "-dpe": "--data-parallel-external-lb",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpl": "--data-parallel-size-local",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-dpn": "--data-parallel-rank",
    "-dpp": "--data-parallel-rpc-port",
    "-dpr": "--data-parallel-start-rank",
    "-ep": "--enable-expert-parallel",
    "-h": "--help",
    "-n": "--nnodes",
    "-pcp": "--prefill-context-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-q": "--quantization",
    "-r": "--node-rank",
    "-sc": "--speculative-config",
    "-tp": "--tensor-parallel-size",
    "--device-memory-utilization": "--gpu-memory-utilization",
}
"""Every other spelling of a flag that vLLM 0.32 knows, to the flag's own name."""

MOST = 2**31 - 1
"""Of tokens, ranks or requests: more is nowhere taken."""

POSITIONALS = ""
"""The name under which the tokens before the first flag are kept."""

_FLAG = re.compile(r"--?[A-Za-z]")
_OPTIMIZATION = re.compile(r"-O=?(?P<level>.*)", re.DOTALL)
_SHORTHAND = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Setting:
    """One flag with its values, as it was written."""

    flag: str
    """The flag's own name, with dashes: `--enable-prefix-caching` for `--no_enable_prefix_caching` too."""
    path: tuple[str, ...]
    """Keys below a JSON flag: ("a", "b") for `--flag.a.b`; () for the flag as a whole."""
    values: tuple[str, ...]
    negated: bool
    tokens: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join(self.tokens)

    def overrides(self, other: Setting) -> bool:
        """Whether this setting leaves nothing of the other.

        One JSON key replaces the whole flag given as JSON text: that is what vLLM makes of the two.
        """
        same_or_below = other.path[: len(self.path)] == self.path
        return self.flag == other.flag and (not other.path or same_or_below)


def settings(args: Iterable[str]) -> Iterator[Setting]:
    """The settings of a command line in their order; positionals, if any, first and under POSITIONALS."""
    group: list[str] = []
    for token in args:
        if group and _FLAG.match(token):
            yield _setting(group)
            group = []
        group.append(token)
    if group:
        yield _setting(group)


def merge_args(worker_args: Iterable[str], role_args: Iterable[str]) -> list[str]:
    """`role_args` over `worker_args`: a flag present is replaced where it stands, others are appended.

    Of a JSON flag given by dotted keys only the keys that the role sets are replaced.
    """
    worker, role = list(settings(worker_args)), list(settings(role_args))
    last_place = {setting.flag: position for position, setting in enumerate(worker)}
    own: dict[str, list[Setting]] = {}
    for setting in role:
        own.setdefault(setting.flag, []).append(setting)
    merged: list[str] = []
    if POSITIONALS not in last_place:
        merged += _tokens(own.get(POSITIONALS, ()))
    for position, setting in enumerate(worker):
        over = own.get(setting.flag, ())
        if not any(s.overrides(setting) for s in over):
            merged += setting.tokens
        if last_place[setting.flag] == position:
            merged += _tokens(over)
    merged += _tokens(s for s in role if s.flag != POSITIONALS and s.flag not in last_place)
    return merged


def without(args: Iterable[str], flags: Iterable[str]) -> list[str]:
    """The command line less every spelling of these flags, with their values and dotted keys."""
    unwanted = {_own_name(flag) for flag in flags}
    return _tokens(s for s in settings(args) if s.flag not in unwanted)


def has_flag(args: Iterable[str], flag: str) -> bool:
    """Whether the flag is set in any spelling, `--no-…` and dotted keys included."""
    return any(s.flag == _own_name(flag) for s in settings(args))


def flag_values(args: Iterable[str], flag: str) -> tuple[str, ...] | None:
    """All values of the flag's last occurrence; () for a bare flag, None when it is absent."""
    found = None
    for setting in settings(args):
        if setting.flag == _own_name(flag) and not setting.path:
            found = setting.values
    return found


def flag_value(args: Iterable[str], flag: str) -> str | None:
    """The (first) value of the flag's last occurrence; None when it is absent or bare."""
    values = flag_values(args, flag)
    return values[0] if values else None


def switch(args: Iterable[str], flag: str) -> bool | None:
    """A boolean flag as it was last given: True for `--x`, False for `--no-x`, None when absent."""
    found = None
    for setting in settings(args):
        if setting.flag == _own_name(flag):
            found = not setting.negated
    return found


def int_value(args: Iterable[str], flag: str, most: int = MOST) -> int | None:
    """The flag's value as a number; None when it is absent, `auto` or `-1`: the choice is vLLM's.

    `8k` is 8000 and `8K` is 8192, as vLLM reads them. Raises ValueError for anything else, and for what is no
    count of anything: below -1, or above `most`.
    """
    value = flag_value(args, flag)
    if value is None or value.lower() == "auto":
        return None
    try:
        number = _number(value.strip())
    except (ValueError, OverflowError):
        raise ValueError(f"{flag} {value}: is not a number") from None
    if not -1 <= number <= most:
        raise ValueError(f"{flag} {value}: is no number between -1 and {most}")
    return None if number == -1 else number


def _number(text: str) -> int:
    match = _SHORTHAND.fullmatch(text)
    if match is None:
        return int(text)
    number, unit = match[1], _SUFFIXES[match[2]]
    return int(float(number) * unit) if match[2].islower() else int(number) * unit


def _tokens(found: Iterable[Setting]) -> list[str]:
    return [token for setting in found for token in setting.tokens]


def _setting(tokens: Sequence[str]) -> Setting:
    head, rest = tokens[0], tuple(tokens[1:])
    if not _FLAG.match(head):
        return Setting(POSITIONALS, (), tuple(tokens), negated=False, tokens=tuple(tokens))
    if match := _OPTIMIZATION.fullmatch(head):
        attached = (match["level"],) if match["level"] else ()
        return Setting("--optimization-level", (), attached + rest, negated=False, tokens=tuple(tokens))
    name, equals, value = head.partition("=")
    name, *keys = name.split(".")
    values = (value, *rest) if equals else rest
    flag = _own_name(name)
    path = tuple(key.removesuffix("+") for key in keys)
    return Setting(flag, path, values, negated=flag != _own_name(name, negation=False), tokens=tuple(tokens))


def _own_name(spelling: str, *, negation: bool = True) -> str:
    """The flag's own name: dashes for underscores, no alias and (unless asked to keep it) no `--no-`."""
    name = spelling.replace("_", "-") if spelling.startswith("--") else spelling
    if negation and name.startswith("--no-"):
        name = "--" + name.removeprefix("--no-")
    return ALIASES.get(name, name)
