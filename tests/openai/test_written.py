"""Text that grows token by token: the same as decoded at once, nothing of a stop, no half characters."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from openrl.app.openai.written import REPLACEMENT, Drawn, Shown, Written

BOS, EOS = 257, 258
SPECIALS = {256: "<pad>", BOS: "<bos>", EOS: "<eos>", 259: "<unk>"}


def decode(ids: Sequence[int]) -> str:
    """Decode as a byte-level tokenizer does: a token is a byte, or a special token's text."""
    parts = (SPECIALS[token].encode() if token in SPECIALS else bytes([token]) for token in ids)
    return b"".join(parts).decode(errors="replace")


def written(*, stops: Sequence[str] = (), before: Sequence[int] = (BOS, 104), offset: int = 0) -> Written:
    return Written(decode, before=before, hidden=frozenset(SPECIALS), stops=stops, offset=offset)


def grow(growing: Written, ids: Sequence[int], ended: str = "length") -> list[list[Shown]]:
    last = len(ids) - 1
    return [growing.push(Drawn(token, -1.0, ()), ended if place == last else "") for place, token in enumerate(ids)]


def text_of(shown: Sequence[Sequence[Shown]]) -> str:
    return "".join(each.text for step in shown for each in step)


TEXTS = st.text(st.sampled_from("ab.\n é日🙂"), min_size=1, max_size=20)
STOPS = st.lists(st.text(st.sampled_from("ab.\né日"), min_size=1, max_size=4), max_size=3)


@given(text=TEXTS)
def test_pieces_put_together_are_the_text_and_none_ends_inside_a_character(text: str) -> None:
    steps = grow(written(), list(text.encode()))
    assert text_of(steps) == text
    assert not any(REPLACEMENT in each.text for step in steps for each in step)


@given(text=TEXTS, stops=STOPS)
def test_a_stop_is_never_shown_nor_any_part_of_it(text: str, stops: list[str]) -> None:
    growing = written(stops=stops)
    steps = grow(growing, list(text.encode()))
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    # The earliest stop to be complete ends the text, where the first of those that are complete by then begins.
    end = min((text.find(stop) + len(stop) for stop in stops if stop in text), default=None)
    if end is None:
        assert (text_of(steps), growing.finish) == (text, "length")
    else:
        begin = min(place for stop in stops if (place := text[:end].find(stop)) >= 0)
        assert (text_of(steps), growing.finish) == (text[:begin], "stop")
        assert begin in places


@given(text=TEXTS, stops=STOPS, offset=st.integers(0, 9))
def test_an_offset_is_where_the_tokens_text_begins(text: str, stops: list[str], offset: int) -> None:
    steps = grow(written(stops=stops, offset=offset), list(text.encode()))
    whole, end = text_of(steps), 0
    for each in (each for step in steps for each in step):
        assert each.offset - offset == end
        assert whole[end : end + len(each.text)] == each.text
        end += len(each.text)
    assert end == len(whole)


@given(ids=st.lists(st.integers(0, 259), min_size=1, max_size=30), stops=STOPS)
def test_whatever_is_drawn_each_token_is_told_once_and_in_order(ids: list[int], stops: list[str]) -> None:
    growing = written(stops=stops)
    told = [each.drawn.token for step in grow(growing, ids) for each in step]
    assert told == growing.tokens == ids[: len(told)]
    assert len(told) == len(ids) or growing.finish == "stop"


def test_a_beginning_of_a_stop_is_held_back_until_it_is_clear_that_it_is_none() -> None:
    growing = written(stops=["END"])
    told = ["".join(each.text for each in step) for step in grow(growing, list(b"xENyz"))]
    assert told == ["x", "", "", "ENy", "z"]


def test_special_tokens_are_told_and_not_shown_and_a_stop_may_be_one() -> None:
    steps = grow(written(), [*b"a", 259, *b"b", EOS], "stop")
    assert text_of(steps) == "ab"
    assert [each.name for step in steps for each in step] == ["a", "<unk>", "b", "<eos>"]
    growing = written(stops=["<unk>"])
    assert text_of(grow(growing, [*b"a", 259])) == "a" and growing.finish == "stop"


def test_the_token_that_ends_a_sequence_is_not_text_even_if_it_reads_as_some() -> None:
    growing = written()
    assert text_of(grow(growing, list(b"ab"), "stop")) == "a" and growing.finish == "stop"


def test_a_character_that_is_not_whole_at_the_end_is_left_out() -> None:
    assert text_of(grow(written(), list("aé".encode())[:-1])) == "a"


def test_a_character_that_began_in_the_prompt_is_whole_in_the_text() -> None:
    first, second = "é".encode()
    assert text_of(grow(written(before=[104, first]), [second, *b"a"])) == "éa"


def test_bytes_that_are_no_characters_come_out_after_a_while() -> None:
    steps = grow(written(), [0x80] * 20 + list(b"a"))
    assert text_of(steps[:9]).startswith(REPLACEMENT)
    assert text_of(steps).endswith("a")
