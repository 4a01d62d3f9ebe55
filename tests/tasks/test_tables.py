"""Tables keep what somebody has to type again."""

from __future__ import annotations

import pytest
from rich.table import Table

from openrl.tasks import tables

LONG = "tinker://s-0123456789abcdef0123456789abcdef:train:0/weights/a-name-that-is-quite-long"


def shown(capsys: pytest.CaptureFixture[str], columns: int = 3) -> str:
    table = Table(*(f"column {number}" for number in range(columns)), "why")
    table.add_row(*[LONG] * columns, "one operation waits and no accelerator is free for its worker now")
    tables.show(table, sentences="why")
    return capsys.readouterr().out


def test_a_row_is_one_line_where_nobody_looks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert [line.count(LONG) for line in shown(capsys).splitlines() if LONG in line] == [3]


def test_nothing_is_cut_where_there_is_little_room(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "70")
    lines = [line.split("│") for line in shown(capsys, columns=2).splitlines() if line.startswith("│")]
    assert "".join(cells[1].strip() for cells in lines) == LONG
    assert max(len(cells[-2].strip()) for cells in lines) > 16 and "…" not in "".join(map("".join, lines))
