"""Answers follow from what the model sees, and from nothing else."""

from __future__ import annotations

from tandem.sim.text import Answer, Style, likelihoods

STYLE = Style(words=list(range(100, 140)), eos=2, length=(5, 9))


def tokens(count: int, prompt: list[int], **more: object) -> list[int]:
    answer = Answer(STYLE, prompt, **more)  # type: ignore[arg-type]
    return [answer.next_token() for _ in range(count)]


def test_the_same_prompt_gets_the_same_answer() -> None:
    assert tokens(5, [1, 2, 3]) == tokens(5, [1, 2, 3])
    assert tokens(5, [1, 2, 3]) != tokens(5, [1, 2, 4])


def test_a_prompt_that_ends_with_its_answers_beginning_is_continued() -> None:
    whole = tokens(5, [1, 2, 3])
    assert tokens(3, [1, 2, 3, *whole[:2]]) == whole[2:]


def test_another_choice_or_another_prompts_kv_gives_another_answer() -> None:
    plain = tokens(5, [1, 2, 3])
    assert tokens(5, [1, 2, 3], variant=b"1") != plain
    assert tokens(5, [1, 2, 3], foreign=b"x") != plain


def test_it_ends_within_its_length_and_not_before_it_may() -> None:
    for i in range(50):
        length = tokens(12, [i]).index(STYLE.eos)
        assert 5 <= length <= 9
    assert tokens(30, [1], at_least=20).index(STYLE.eos) == 20


def test_likelihoods_fall_from_the_chosen_token() -> None:
    likely = likelihoods([1, 2, 105], STYLE.words, 4)
    assert likely[0][0] == 105
    values = [value for _, value in likely]
    assert values == sorted(values, reverse=True)
    assert values[0] < 0
    assert len({token for token, _ in likely}) == 4
