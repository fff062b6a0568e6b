"""Tables as plain text, for `print`."""

from __future__ import annotations

import abc
import json
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
