"""Numbers formatted for people: with units, in sentences, in tables."""

from __future__ import annotations

import abc
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

_WIDEST = 1000


def table_text(table: Any) -> str:
    """Returns a `rich` table, or an object with `__rich__`, as plain text.

    The text has no colors and does not depend on the width of the terminal, because it
    may be printed anywhere. No number is truncated.
    """
    from rich.console import Console

    console = Console(
        width=_WIDEST, color_system=None, force_terminal=False, force_jupyter=False
    )
    with console.capture() as text:
        console.print(table)
    return "\n".join(line.rstrip() for line in text.get().splitlines()).strip("\n")


def number_table(
    columns: Iterable[str],
    rows: Iterable[Sequence[str]],
    caption: str,
    *,
    named: bool = False,
) -> Table:
    """Returns a `rich` table of right-justified texts, none of which is markup.

    Columns are two spaces apart, so that eight of them fit a terminal of 80 characters.
    With `named`, the first one has names, which wrap instead of being truncated.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=box.SIMPLE_HEAD,
        caption=Text(f"\n{caption}"),
        caption_justify="left",
        padding=(0, 0, 0, 1),
        pad_edge=False,
        show_edge=False,
    )
    for name in columns:
        table.add_column(Text(name), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    if named:
        first = table.columns[0]
        first.justify, first.no_wrap, first.overflow = "left", False, "fold"
    return table


def bytes_text(num_bytes: float | None) -> str:
    """Returns a size as text, in GB (1e9 bytes) or MB.

    Example:
      >>> bytes_text(1.5e9), bytes_text(2e6), bytes_text(None)
      ('1.5 GB', '2 MB', 'unknown')
    """
    if num_bytes is None:
        return "unknown"
    gigabytes = num_bytes / 1e9
    return f"{gigabytes:.4g} GB" if gigabytes >= 0.1 else f"{num_bytes / 1e6:.4g} MB"


def count_shapes(number: int) -> str:
    """Returns a number of shapes as text.

    Example:
      >>> count_shapes(1), count_shapes(2)
      ('1 shape', '2 shapes')
    """
    return "1 shape" if number == 1 else f"{number} shapes"


def format_cost(cost: float, cost_unit: str, unit: str = "tokens") -> str:
    """Returns a cost as text, with its unit.

    Example:
      >>> format_cost(1234.5, "s"), format_cost(2.5e15, "FLOP")
      ('1,234.5 s', '2.5e+15 FLOP')

    Args:
      cost: the number.
      cost_unit: "tokens", "s", "FLOP", or the unit of a user's cost function.
      unit: the name to print for "tokens", such as "bytes".
    """
    name = unit if cost_unit == "tokens" else cost_unit
    return f"{format_number(cost, cost_unit)} {name}"


def format_duration(seconds: float) -> str:
    """Returns a time as text, in its largest unit.

    Example:
      >>> format_duration(5), format_duration(5000), format_duration(1e6)
      ('5.00 s', '1.39 h', '11.57 d')
    """
    units = {"d": 86_400, "h": 3_600, "min": 60, "s": 1}
    unit = next((name for name, size in units.items() if seconds >= size), "s")
    return f"{seconds / units[unit]:.2f} {unit}"


def format_number(cost: float, cost_unit: str) -> str:
    """Returns the text of `format_cost` without the unit."""
    if (cost_unit == "tokens" and cost < 1e11) or 1e5 <= cost < 1e9:
        return f"{cost:,.0f}"
    return f"{cost:,.1f}" if 10 <= cost < 1e9 else f"{cost:.3g}"


class Record(abc.ABC):
    """Numbers for people and for programs: printed as a table, written as JSON."""

    @abc.abstractmethod
    def to_dict(self) -> Any:
        """Returns all numbers as plain Python values."""

    @abc.abstractmethod
    def __rich__(self) -> Any:
        """Returns a `rich` table, for a terminal."""

    @property
    def legends(self) -> tuple[str, ...]:
        """Explanations of columns, which are at the end of the captions of tables."""
        return ()

    def to_json(self) -> str:
        """Returns all numbers as JSON."""
        return json.dumps(self.to_dict())

    def __str__(self) -> str:
        """Returns the table as plain text."""
        return table_text(self)
