"""Tables as plain text, for `print`."""

from __future__ import annotations

from typing import Any

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
