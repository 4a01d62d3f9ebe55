"""The beat's file: kept over restarts, and never two processes' at once."""

from pathlib import Path

from openrl.scheduler.timetable import timetable


def test_the_first_has_the_file_and_another_one_of_its_own(tmp_path: Path) -> None:
    with timetable(tmp_path / "beat") as first:
        with timetable(tmp_path / "beat") as second:
            assert first.parent == tmp_path / "beat" and second.parent != first.parent
            second.write_text("for now")
        assert not second.exists()


def test_the_file_is_the_same_after_a_restart(tmp_path: Path) -> None:
    with timetable(tmp_path) as path:
        path.write_text("at noon")
    with timetable(tmp_path) as path:
        assert path.read_text() == "at noon"
