"""Formats numbers for people: with units, and in tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def number_table(
    columns: Iterable[str], rows: Iterable[Sequence[str]], caption: str
) -> Table:
    """Returns a `rich` table of right-justified text, not interpreted as markup."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, caption=Text(caption), caption_justify="left")
    for name in columns:
        table.add_column(Text(name), justify="right")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def count_shapes(number: int) -> str:
    """Returns a number of shapes as text.

    Example:
      >>> count_shapes(1), count_shapes(2)
      ('1 shape', '2 shapes')
    """
    return "1 shape" if number == 1 else f"{number} shapes"


def in_unit(cost: float, unit: str) -> str:
    """Returns a cost with its unit as text.

    Example:
      >>> in_unit(1234.5, "s"), in_unit(2.5e15, "FLOP"), in_unit(90_000, "tokens")
      ('1,234.5 s', '2.5e+15 FLOP', '90,000 tokens')
    """
    return f"{number_in_unit(cost, unit)} {unit}"


def number_in_unit(cost: float, unit: str) -> str:
    """Returns a cost as text like `in_unit`, but without the unit."""
    if unit == "tokens" and cost < 1e11:
        return f"{cost:,.0f}"
    return f"{cost:,.1f}" if 10 <= cost < 1e9 else f"{cost:.3g}"
