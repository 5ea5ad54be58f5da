"""A chat whose beginning was seen is not tokenized from the start again, and its ids stay the same."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from tandem.prompt import BadPrompt, PromptCounter, load
from tandem.prompt.segments import SegmentCache, markers
from tandem.prompt.tokenizer import ReferenceEncoder

MANY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Recorder:
    """An encoder that notes what it is asked."""

    def __init__(self, inner: ReferenceEncoder) -> None:
        self.inner = inner
        self.asked: list[str] = []

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self.asked.append(text)
        return self.inner.encode(text, add_special_tokens)


def letters(*added: AddedToken, metaspace: bool = False) -> ReferenceEncoder:
    """A tokenizer of single characters, and these tokens."""
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate("abcdxyz<> \n▁")}, [], unk_token="x"))
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Prepend("y")
    tokenizer.add_tokens(list(added))
    return ReferenceEncoder(tokenizer)


def plain(content: str, **flags: bool) -> AddedToken:
    return AddedToken(content, **{"normalized": False, **flags})


@pytest.mark.parametrize(
    ("tokens", "safe"),
    [
        ([plain("<a>"), plain("<b>")], {"<a>", "<b>"}),
        ([plain("<a>"), plain("<a>b")], {"<a>b"}),  # the longer one takes the shorter one away
        ([plain("<a>"), plain("b<a>")], {"<a>", "b<a>"}),  # both end at the same place
        ([plain("ab"), plain("bc")], {"ab"}),  # in "abc" there is no "bc"
        ([plain("<a>"), plain("x<a>y")], {"x<a>y"}),
        ([plain("aba")], set()),  # meets itself
        ([plain("<a>", rstrip=True), plain("<b>", lstrip=True)], {"<b>"}),
        ([plain("<b", rstrip=True), plain("b")], set()),  # the longer one ends with it, and takes spaces
        ([plain(" <a>"), plain("<b>")], {"<b>"}),  # its space may belong to another token
        ([AddedToken("<a>", normalized=True), plain("<b>")], {"<b>"}),
        ([plain("<a>"), plain("cd", single_word=True)], set()),
    ],
)
def test_a_text_may_be_cut_behind_some_added_tokens_only(tokens: list[AddedToken], safe: set[str]) -> None:
    assert set(markers(letters(*tokens).added_tokens)) == safe
    assert markers(letters(*tokens).added_tokens, splits_special_tokens=True) == []


spellings = st.text("abc<>", min_size=1, max_size=4)
added_tokens = st.lists(
    st.builds(plain, spellings, lstrip=st.booleans(), rstrip=st.booleans(), normalized=st.booleans()),
    min_size=1,
    max_size=5,
)


@MANY
@given(
    tokens=added_tokens, pieces=st.lists(st.text("abc<> \n", max_size=9), max_size=9), metaspace=st.booleans()
)
def test_whatever_the_added_tokens_the_ids_are_those_of_the_whole_text(
    tokens: list[AddedToken], pieces: list[str], metaspace: bool
) -> None:
    reference = letters(*tokens, metaspace=metaspace)
    cache = SegmentCache(reference, markers(reference.added_tokens), 10_000, shortest=1)
    for end in range(len(pieces) + 1):
        text = "".join(p + tokens[i % len(tokens)].content for i, p in enumerate(pieces[:end]))
        for _ in range(2):
            assert cache.encode(text, False) == reference.encode(text, False)


words = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
    st.sampled_from(
        ["<|im_end|>", "<|im_start|>", "</s>", "<s>", "<|eot_id|>", " ", "\n", "[SEP]", "<image>"]
    ),
    st.sampled_from(["word " * 60, "数える" * 50, "🚲 " * 90]),
)
contents = st.lists(words, min_size=1, max_size=5).map("".join)


def grown(texts: list[str]) -> list[dict[str, Any]]:
    """The requests of a chat, each one turn longer than the one before."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return [{"messages": messages[: i + 1]} for i in range(0, len(messages), 2)]


@pytest.fixture(scope="module")
def from_scratch(model_dirs: dict[str, Path]) -> dict[str, PromptCounter]:
    """Counters that remember nothing, one of each family."""
    return {name: load(model_dirs[name], cache_bytes=0) for name in FAMILIES}


FAMILIES = ["smollm2", "llama3", "deepseek", "qwen", "gemma", "mistral", "llama2 legacy", "unigram", "bert"]


@pytest.mark.parametrize("family", FAMILIES)
@MANY
@given(texts=st.lists(contents, min_size=1, max_size=7))
def test_a_growing_chat_has_the_ids_that_it_has_from_scratch(
    family: str, texts: list[str], counters: dict[str, PromptCounter], from_scratch: dict[str, PromptCounter]
) -> None:
    for body in grown(texts):
        try:
            expected = from_scratch[family].chat(body)
        except BadPrompt:  # a template may refuse it
            continue
        assert counters[family].chat(body) == expected


def test_only_what_is_new_is_tokenized() -> None:
    recorder = Recorder(letters(plain("<a>")))
    cache = SegmentCache(recorder, ["<a>"], 100_000, shortest=10)
    turns = [f"{c * 20}<a>" for c in "abcd"]
    for end in range(1, 5):
        cache.encode("".join(turns[:end]) + "xx", False)
    first, *later = turns
    assert recorder.asked == [
        *(first, "<a>xx"),
        *(piece for turn in later for piece in ("<a>" + turn, "<a>xx")),
    ]


def test_short_pieces_are_not_cut_apart() -> None:
    recorder = Recorder(letters(plain("<a>")))
    SegmentCache(recorder, ["<a>"], 100_000, shortest=10).encode("a<a>b<a>c<a>d<a>a<a>", False)
    assert recorder.asked == ["a<a>b<a>c<a>", "<a>d<a>a<a>"]


def test_special_tokens_around_the_whole_are_left_to_the_library() -> None:
    recorder = Recorder(letters(plain("<a>")))
    text = "a" * 20 + "<a>b"
    SegmentCache(recorder, ["<a>"], 100_000, shortest=10).encode(text, True)
    assert recorder.asked == [text]


def test_the_memory_is_bounded_and_what_was_not_used_for_longest_leaves_first() -> None:
    recorder = Recorder(letters(plain("<a>")))
    cache = SegmentCache(recorder, ["<a>"], 4_000, shortest=10)
    kept = "k" * 50 + "<a>"
    for i in range(200):
        cache.encode(kept, False)
        cache.encode(f"{i}{'a' * 50}<a>", False)
        assert cache.size <= 4_000
    assert recorder.asked.count(kept) == 1
    cache.encode("a" * 2_000 + "<a>", False)
    cache.encode(kept, False)
    assert recorder.asked.count(kept) == 1, "one large piece does not push out the others"


@pytest.mark.parametrize("name", ["smollm2", "llama3", "mistral", "deepseek", "qwen"])
def test_a_chats_end_alone_reaches_the_tokenizer(
    name: str, model_dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch, texts: dict[str, str]
) -> None:
    asked: list[int] = []
    encode = ReferenceEncoder.encode

    def note(self: ReferenceEncoder, text: str, add_special_tokens: bool) -> list[int]:
        asked.append(len(text))
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(ReferenceEncoder, "encode", note)
    counter = load(model_dirs[name], fast=False)
    chat = grown([texts["english"] * 30] * 21)
    counter.chat(chat[-2])
    before = sum(asked)
    asked.clear()
    counter.chat(chat[-1])
    assert sum(asked) < before / 4, "of eleven turns the last"


def test_threads_may_share_a_counter(model_dirs: dict[str, Path], texts: dict[str, str]) -> None:
    from concurrent.futures import ThreadPoolExecutor

    counter = load(model_dirs["llama3"], cache_bytes=20_000)
    chats: list[dict[str, Any]] = [c for text in texts.values() for c in grown([text * 5] * 9)]
    with ThreadPoolExecutor(4) as pool:
        counts = list(pool.map(lambda chat: counter.chat(chat).count, chats * 3))
    assert counts == [load_once(model_dirs["llama3"]).chat(chat).count for chat in chats] * 3


def load_once(directory: Path, known: dict[Path, PromptCounter] = {}) -> PromptCounter:  # noqa: B006
    if directory not in known:
        known[directory] = load(directory, cache_bytes=0)
    return known[directory]
