"""Stop strings across token boundaries, with a decoder of bytes."""

import pytest

from openrl.workers.sampler.stops import StopText


def decode(tokens):
    return b"".join(PIECES[token] for token in tokens).decode(errors="replace")


PIECES = [
    b"Hello",
    b" wor",
    b"ld END of",
    b" EN",
    b"D",
    b"\xf0\x9f",
    b"\x98\x80",
    b"<|im",
    b"_end|>",
    b"\xff",
    b" a\xe2",
]


def pushed_until_stop(stops, tokens, prompt=(0,)):
    watcher = StopText(decode, stops, prompt=prompt)
    for count, token in enumerate(tokens, 1):
        if watcher.push(token):
            return count
    return None


@pytest.mark.parametrize(
    ("stops", "tokens", "expected"),
    [
        (("END",), [1, 2, 1], 2),
        (("END",), [0, 3, 4, 1], 3),
        (("<|im_end|>",), [1, 7, 8, 1], 3),
        (("\U0001f600",), [1, 5, 6, 1], 3),
        (("nothing",), [1, 2, 3, 4], None),
        (("zzz", "wor"), [1], 1),
        (("Hello world",), [0, 1, 2], 3),
        ((" a",), [10, 5], 1),
        (("END",), [9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 3, 4], 12),
        (("\ufffdD",), [9, 4], 2),
    ],
)
def test_a_stop_string_ends_at_the_token_that_completes_it(stops, tokens, expected):
    assert pushed_until_stop(stops, tokens) == expected


def test_the_prompt_itself_never_counts():
    assert pushed_until_stop(("END",), [4, 1], prompt=(0, 3)) is None
    assert pushed_until_stop(("Hello",), [1], prompt=(0,)) is None


def test_an_empty_prompt_window_is_fine():
    assert pushed_until_stop(("Hello",), [0], prompt=()) == 1
