"""What is needed of the processes that do something together; `Processes` has it."""

from __future__ import annotations

from typing import Protocol


class Meeting(Protocol):
    """Processes that tell one another a word, each as often as the others.

    Attributes:
      index: of this process.
      count: of all.
    """

    index: int
    count: int

    def gather(self, name: str, value: str) -> list[str]:
        """Returns what every process gave, in order. All of them have to call it."""
        ...


class Alone:
    """One process, which meets nobody."""

    index = 0
    count = 1

    def gather(self, name: str, value: str) -> list[str]:
        del name
        return [value]
