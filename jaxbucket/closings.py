"""Buckets that streams of several processes leave out for a while, as they stay empty.

What all processes know of a step is its number of real tokens. Where it had none, no
process had anything that fits: its bucket and the shorter ones are left out from some
later step on, in all of them. Should something come for them, it goes up.
"""

from __future__ import annotations

import collections
from typing import Any

# How many steps it is left out: short examples may come again.
_LASTS = 256
# How many steps longer it is known, for states of steps before.
_KNOWN = 256
# What stands for a step of the longest bucket without a token: the end of all.
_END = -1


class Closings:
    """Steps that were told, as far as later ones depend on them.

    Args:
      late: how many steps later a number of tokens is looked at.
      ahead: from which step on a bucket is left out, counted from the one told.
    """

    def __init__(self, late: int, ahead: int):
        self._late = late
        self._ahead = ahead
        self._told: collections.deque[tuple[int, int | None, Any]] = collections.deque()
        # (step, the longest bucket that is left out because of it).
        self._found: list[tuple[int, int]] = []
        self._unchecked: list[int] = []

    def tell(self, step: int, bucket: int | None, num_tokens: Any) -> bool:
        """Adds what a step had; returns whether the streams were over, a bit earlier.

        Args:
          step: the number of the step; told one after the other.
          bucket: the longest that it had, an index into the plan's; None for the
            plan's longest, which any example fits in.
          num_tokens: real ones of the step, over all processes.
        """
        self._told.append((step, bucket, num_tokens))
        while self._told and self._told[0][0] <= step - self._late:
            self._look()
        return any(k == _END and d <= step - self._late for d, k in self._found)

    def _look(self) -> None:
        step, bucket, num_tokens = self._told.popleft()
        if int(num_tokens) == 0:
            self._found.append((step, _END if bucket is None else bucket))
            self._unchecked.append(step)
        last = step - self._ahead - _LASTS - _KNOWN
        self._found = [found for found in self._found if found[0] > last]

    def closed(self, step: int, first_step: int) -> int:
        """Returns the longest bucket that a step leaves out, -1 for none.

        Args:
          step: the one to be filled.
          first_step: from which on its plan is in force; buckets before are others.
        """
        last = step - self._ahead
        first = max(first_step, last - _LASTS + 1)
        return max((k for d, k in self._found if first <= d <= last), default=-1)

    def came_too_late(self, step: int) -> int | None:
        """Returns what was found since it was asked and has an effect before a step.

        Returns:
          The step that it was found of; None if there is none.
        """
        late = [found for found in self._unchecked if found + self._ahead < step]
        self._unchecked.clear()
        return late[0] if late else None

    def to_text(self, step: int) -> str:
        """Returns what steps before one were found to have; `from_text` reads it."""
        while self._told and self._told[0][0] < step:
            self._look()
        return " ".join(f"{d}:{k}" for d, k in self._found if d < step)

    def from_text(self, text: str) -> None:
        pairs = [pair.split(":") for pair in text.split()]
        self._found = [(int(d), int(k)) for d, k in pairs]
