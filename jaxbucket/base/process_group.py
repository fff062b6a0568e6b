"""What functions that run in several processes need of them; `Processes` has it."""

from __future__ import annotations

from typing import Protocol


class ProcessGroup(Protocol):
    """Processes that exchange text, each as often as the others.

    Attributes:
      index: of this process.
      count: of all.
    """

    index: int
    count: int

    def gather(self, name: str, value: str) -> list[str]:
        """Returns the values of all processes, in order. All of them have to call it.

        Args:
          name: what it is for, as messages name it.
          value: that of this process.
        """
        ...


class SingleProcess:
    """The group of a process that is alone."""

    index = 0
    count = 1

    def gather(self, name: str, value: str) -> list[str]:
        del name
        return [value]
