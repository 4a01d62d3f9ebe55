"""Tables for people. What somebody may have to type again, an id or a token, is never cut short.

Knows neither the columns' meaning nor where the rows come from; scripts take JSON.
"""

from __future__ import annotations

import os

from rich.console import Console
from rich.table import Table

READABLE = 24
"""Characters that a column of whole sentences has at least."""


def show(table: Table, *, sentences: str = "") -> None:
    """Print a table: folded where a terminal is narrow, one line a row where nobody looks.

    `sentences`: the column that has some.
    """
    for column in table.columns:
        column.overflow = "fold"
        if column.header == sentences:
            column.min_width = READABLE
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = max(console.width, console.measure(table, options=console.options.update(width=10_000)).maximum)
    console.print(table)
