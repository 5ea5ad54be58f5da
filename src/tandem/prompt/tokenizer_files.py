"""Reads a model's tokenizer directory into what transformers 5 would make of it, without transformers.

Follows `PreTrainedTokenizerBase.from_pretrained` and `TokenizersBackend.__init__`: which files count, which
tokens are added in which order, what the special tokens are called.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from tandem.prompt import families
from tandem.prompt.errors import LoadError, NotExact
from tandem.prompt.tokenizer import ReferenceEncoder

FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
)
"""The files of a model's folder that are read here. Of additional templates vLLM uses tool_use alone."""

MARKS = (
    "chat_template.json",
    "tekken.json",
    *(f"tokenizer.model.{version}" for version in ("v1", "v2", "v3", "v7", "v7m1")),
)
"""Those of which it only counts whether they are there: vLLM then renders or tokenizes otherwise."""

_CONFIG = "tokenizer_config.json"
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What a tokenizer directory says.

    encoder: None where local ids cannot be promised; `inexact` then says why.
    special_tokens: named special tokens (bos_token, ...) as chat templates see them.
    chat_templates: name -> source; the unnamed template is "default".
    """

    encoder: ReferenceEncoder | None
    inexact: str = ""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_templates: Mapping[str, str] = field(default_factory=dict)


def read(directory: Path) -> TokenizerFiles:
    """Raises LoadError if the directory, or a file in it, is unusable."""
    if not directory.is_dir():
        raise LoadError(f"{directory} is no directory. Give the one that holds the model's tokenizer.json.")
    config = read_object(directory / _CONFIG)
    templates = _chat_templates(directory, config)
    path = directory / "tokenizer.json"
    document = read_object(path)
    if not document:
        return TokenizerFiles(None, f"there is no {path}", chat_templates=templates)
    try:
        family = families.of(config, read_object(directory / "config.json"))
        tokens = _special_tokens(directory, config, document, family)
        tokenizer = _build(document, config, tokens, family)
    except NotExact as e:
        return TokenizerFiles(None, e.detail, chat_templates=templates)
    except LoadError:
        raise
    except Exception as e:  # the library raises bare Exception on a malformed file
        raise LoadError(
            f"{path} cannot be loaded: {e}. Copy the model's tokenizer files again, or use a tokenizers "
            "library at least as new as the one that wrote them."
        ) from e
    named = {name: _content(token) for name, token in tokens.named.items()}
    return TokenizerFiles(ReferenceEncoder(tokenizer), "", named, templates)


def read_object(path: Path) -> dict[str, object]:
    """A JSON file's object; empty if there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        raise LoadError(f"{path} cannot be read as JSON: {e}. Copy the file from the model again.") from e
    if not isinstance(value, dict):
        raise LoadError(f"{path} holds no JSON object. Copy the file from the model again.")
    return value


def _chat_templates(directory: Path, config: Mapping[str, object]) -> dict[str, str]:
    """Template files replace the entry in tokenizer_config.json."""
    paths = [directory / "chat_template.jinja"] if (directory / "chat_template.jinja").is_file() else []
    paths += sorted(directory.glob("additional_chat_templates/*.jinja"))
    try:
        files = {path.stem: path.read_text(encoding="utf-8") for path in paths}
    except (OSError, UnicodeDecodeError) as e:
        raise LoadError(f"A chat template in {directory} cannot be read: {e}. Copy it again.") from e
    if files:
        return {"default" if name == "chat_template" else name: source for name, source in files.items()}
    entry = config.get("chat_template")
    if isinstance(entry, str):
        return {"default": entry}
    if isinstance(entry, list):  # a dict with fixed keys for each template
        entry = {t.get("name"): t.get("template") for t in entry if isinstance(t, dict)}
    if entry is None:
        return {}
    if not isinstance(entry, dict) or not all(
        isinstance(part, str) for pair in entry.items() for part in pair
    ):
        raise LoadError(
            f"{directory / _CONFIG}: chat_template is neither a string nor a list of objects with name and "
            "template. Copy the file from the model again."
        )
    return entry


@dataclass(frozen=True, slots=True)
class _SpecialTokens:
    """The tokens of tokenizer_config.json and of the legacy files beside it.

    named: bos_token, ... (standard names first, then the model's own), in the order that they are added.
    extra: special tokens without a name.
    by_id: tokens that belong to the vocabulary but are matched before it is consulted.
    """

    named: Mapping[str, str | AddedToken]
    extra: list[str | AddedToken]
    by_id: Mapping[int, AddedToken]


def _special_tokens(
    directory: Path, config: Mapping[str, object], document: Mapping[str, object], family: families.Family
) -> _SpecialTokens:
    options = {name: _revived(value) for name, value in config.items()}
    # Strings whose name ends in _token are tokens of the model's own; so are marked objects, after the merge.
    own = {name: v for name, v in options.items() if _is_own_name(name) and isinstance(config[name], str)}
    extra = options.get("extra_special_tokens") or options.get("additional_special_tokens")
    if isinstance(decoder := options.get("added_tokens_decoder"), dict):
        by_id = {int(id): _added(token) for id, token in decoder.items()}
    else:
        by_id = _added_tokens(directory, document)
        extra = _merge_legacy_map(directory, options, extra)
    if isinstance(extra, dict):
        own |= extra
        extra = []
    own = {n: v for n, v in options.items() if _is_own_name(n) and isinstance(v, AddedToken)} | own

    by_content = {token.content: token for token in by_id.values()}
    named: dict[str, str | AddedToken] = {}
    for name in _NAMED:
        token = options.get(name, family.special_tokens.get(name))
        if token is not None:
            token = _checked(token, directory, name)
            named[name] = by_content.get(_content(token), token) if name in options else token
    named |= {name: _checked(token, directory, name) for name, token in own.items()}
    if not isinstance(extra, list | None):
        raise LoadError(f"{directory / _CONFIG}: extra_special_tokens is neither a list nor an object.")
    unnamed = [_checked(token, directory, "extra_special_tokens") for token in extra or ()]
    return _SpecialTokens(named, unnamed, by_id)


def _is_own_name(name: str) -> bool:
    return name.endswith("_token") and name not in _NAMED


def _added_tokens(directory: Path, document: Mapping[str, object]) -> dict[int, AddedToken]:
    entries = document.get("added_tokens")
    if not isinstance(entries, list):
        raise TypeError("added_tokens is no list")
    by_id = {e["id"]: AddedToken(**{key: v for key, v in e.items() if key != "id"}) for e in entries}
    legacy = read_object(directory / "added_tokens.json")
    if missing := [token for token, id in legacy.items() if id not in by_id]:
        raise NotExact("tokenizer", f"added_tokens.json has {missing[0]!r}, tokenizer.json has not")
    return by_id


def _merge_legacy_map(directory: Path, options: dict[str, object], extra: object) -> object:
    """special_tokens_map.json overrides tokenizer_config.json; returns the unnamed special tokens."""
    for name, value in read_object(directory / "special_tokens_map.json").items():
        if name == "extra_special_tokens" and isinstance(value, list):
            known = extra if isinstance(extra, list) else []
            extra = [*known, *(token for token in map(_added_special, value) if token not in known)]
        elif name == "extra_special_tokens":
            extra = value
        elif name == "additional_special_tokens":
            extra = extra or value
        else:
            options[name] = _added_special(value)
    return extra


def _build(
    document: dict[str, object], config: Mapping[str, object], tokens: _SpecialTokens, family: families.Family
) -> Tokenizer:
    unk = tokens.named.get("unk_token")
    rebuilt = family.rebuild(document, config, None if unk is None else _content(unk))
    tokenizer = Tokenizer.from_str(json.dumps(rebuilt))

    adding: list[str | AddedToken] = [token for _, token in sorted(tokens.by_id.items())]
    present = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    present |= {_content(token) for token in adding}
    for token in [*tokens.named.values(), *tokens.extra]:
        # Two spellings of one token both stay: the later one's flags count.
        if _content(token) not in present and token not in adding:
            adding.append(token)
    names = {_content(token) for token in tokens.named.values()}
    tokenizer.add_tokens([_with_special_flag(token, names) for token in adding])
    if family.adds_special_tokens_again:
        again = dict.fromkeys(_content(token) for token in [*tokens.named.values(), *tokens.extra])
        tokenizer.add_tokens([AddedToken(content, special=True) for content in again])
    tokenizer.encode_special_tokens = bool(config.get("split_special_tokens", False))
    return tokenizer


def _with_special_flag(token: str | AddedToken, names: set[str]) -> AddedToken:
    if isinstance(token, str):
        return AddedToken(token, special=True)
    if token.content in names:
        token.special = True
    return token


def _content(token: str | AddedToken) -> str:
    return token if isinstance(token, str) else str(token.content)


def _checked(token: object, directory: Path, name: str) -> str | AddedToken:
    if not isinstance(token, str | AddedToken):
        raise LoadError(f"{directory / _CONFIG}: a token under {name} is no string. Copy the file again.")
    return token


def _revived(value: object) -> object:
    """Objects marked as AddedToken become one, at any depth."""
    if isinstance(value, dict):
        if value.get("__type") == "AddedToken":
            return _added(value)
        return {key: _revived(item) for key, item in value.items()}
    return [_revived(item) for item in value] if isinstance(value, list) else value


def _added(value: object) -> AddedToken:
    if isinstance(value, AddedToken):
        return value
    if not isinstance(value, dict):
        raise TypeError("an added token is no object")
    return AddedToken(**{key: item for key, item in value.items() if key != "__type"})


def _added_special(value: object) -> object:
    return AddedToken(**{**value, "special": True}) if isinstance(value, dict) else value
