"""What has ended in this process is heard by those who wait for it, before and after."""

import threading

from openrl.tasks import endings
from openrl.tasks.endings import Endings

NAME = ("local", "s:train:0:1")


def test_who_waits_hears_how_it_ended_and_whose_it_is_not_does_not():
    told = Endings()
    with told.watch(*NAME) as mine, told.watch("other", NAME[1]) as foreign:
        threading.Timer(0.05, told.note, (*NAME, "no gradient")).start()
        assert mine.wait(30) == "no gradient"
        assert foreign.wait(0) is None


def test_what_had_ended_before_is_known_at_once_and_the_oldest_is_forgotten(monkeypatch):
    monkeypatch.setattr(endings, "MOST", 2)
    told = Endings()
    for number in range(3):
        told.note("local", str(number), "")
    with told.watch("local", "0") as forgotten, told.watch("local", "2") as known:
        assert (forgotten.error, known.error) == (None, "")


def test_a_release_lets_everybody_look_up_without_an_ending():
    told = Endings()
    with told.watch(*NAME) as one, told.watch(*NAME) as other:
        threading.Timer(0.05, told.release).start()
        assert one.wait(30) is None and other.wait(30) is None
        told.note(*NAME, "")
        assert (one.error, other.error) == ("", "")
