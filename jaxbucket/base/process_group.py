"""The interface of a group of processes, which `Processes` implements."""

from __future__ import annotations

from typing import Protocol


class ProcessGroup(Protocol):
    """A group of processes that exchange strings in lockstep.

    Attributes:
      index: the index of this process.
      count: the number of processes.
    """

    index: int
    count: int

    def gather(self, name: str, value: str) -> list[str]:
        """Returns the values of all processes, by index. All processes must call it.

        Args:
          name: the purpose of the exchange, for error messages.
          value: the value of this process.
        """
        ...


class SingleProcess:
    """The group of a single process."""

    index = 0
    count = 1

    def gather(self, name: str, value: str) -> list[str]:
        del name
        return [value]
