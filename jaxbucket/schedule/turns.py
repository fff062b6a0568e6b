"""Turns that several members take in proportion to their shares."""

from __future__ import annotations

import bisect
import itertools
import math
import operator
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

_MAX_PERIOD = 2**16
_MAX_ERROR = 0.05


class _Period:
    """A periodic sequence of turns, spread as evenly as the shares allow.

    Only one period of the sequence is stored.

    Args:
      shares: `[n]` numbers, not negative, of which at least one is positive.
      num_turns: the number of turns that are needed; None for an endless sequence.

    Attributes:
      parts: `[n]` int64, the turns of each member in a period.

    Raises:
      ValueError: if rounding changes a share by more than 5%.
    """

    def __init__(self, shares: Sequence[Fraction], num_turns: int | None = None):
        self.parts = _parts(shares)
        self.period = int(self.parts.sum())
        needed = self.period if num_turns is None else min(self.period, num_turns)
        taking = np.flatnonzero(self.parts)
        members = taking[_assign_turns(self.parts[taking].tolist(), needed)]
        self._members = members.astype(np.uint16)
        # A stable sort keeps the turns of each member in order.
        turns = np.argsort(members, kind="stable")
        counts = np.bincount(members, minlength=len(self.parts))
        self._turns_by_member = np.split(turns, np.cumsum(counts)[:-1])
        self._turns_before = np.empty(needed, np.int64)
        for member_turns in self._turns_by_member:
            self._turns_before[member_turns] = np.arange(len(member_turns))

    def at(self, turn: int) -> tuple[int, int]:
        """Returns the member of a turn, and the number of its earlier turns."""
        periods, turn = divmod(turn, self.period)
        member = int(self._members[turn])
        before = int(self._turns_before[turn])
        return member, periods * int(self.parts[member]) + before

    def before(self, member: int, turn: int) -> int:
        """Returns the number of turns of a member before a turn."""
        periods, turn = divmod(turn, self.period)
        taken = int(np.searchsorted(self._turns_by_member[member], turn))
        return periods * int(self.parts[member]) + taken

    def until(self, member: int, count: int) -> int:
        """Returns the number of turns after which a member has had `count` >= 1."""
        periods, last = divmod(count - 1, int(self.parts[member]))
        return periods * self.period + int(self._turns_by_member[member][last]) + 1


class Turns:
    """Turns in proportion to shares, which may change. Members go on where they were.

    After any number of turns since a change, each of the n members has had its share to
    within `1 - 1 / (2 * n - 2)` of a turn (Tijdeman, "The chairman assignment problem",
    Discrete Mathematics 1980).

    Example:
      >>> half, quarter = Fraction(1, 2), Fraction(1, 4)
      >>> turns = Turns([0, 4], [[half, half], [1 - quarter, quarter]])
      >>> [turns.at(turn) for turn in range(8)]
      [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (0, 3), (1, 2), (0, 4)]

    Args:
      starts: the turns from which the shares hold, ascending from 0.
      shares: for each of them, `[n]` numbers, of which some may be 0. They are rounded
        to multiples of 2**-16 of their sum if an exact period would be longer than
        2**16 turns.

    Raises:
      ValueError: if rounding changes a share by more than 5%.
    """

    def __init__(self, starts: Sequence[int], shares: Sequence[Sequence[Fraction]]):
        self._starts = list(starts)
        lengths = [b - a for a, b in itertools.pairwise(starts)]
        self._turns = list(map(_Period, shares, [*lengths, None]))
        # The number of turns of each member before each period.
        self._before = [[0] * len(shares[0])]
        for length, turns in zip(lengths, self._turns, strict=False):
            before = [
                number + turns.before(member, length)
                for member, number in enumerate(self._before[-1])
            ]
            self._before.append(before)

    def at(self, turn: int) -> tuple[int, int]:
        """Returns the member of a turn, and the number of its earlier turns."""
        index = bisect.bisect_right(self._starts, turn) - 1
        member, number = self._turns[index].at(turn - self._starts[index])
        return member, self._before[index][member] + number

    def before(self, member: int, turn: int) -> int:
        """Returns the number of turns of a member before a turn."""
        index = bisect.bisect_right(self._starts, turn) - 1
        number = self._turns[index].before(member, turn - self._starts[index])
        return self._before[index][member] + number

    def until(self, member: int, count: int) -> int | None:
        """Returns the number of turns after which a member has had `count` >= 1.

        It is None if the member never has as many.
        """
        ends = [before[member] for before in self._before[1:]]
        index = bisect.bisect_left(ends, count)
        turns, missing = self._turns[index], count - self._before[index][member]
        if not turns.parts[member]:
            return None
        return self._starts[index] + turns.until(member, missing)


def _parts(shares: Sequence[Fraction]) -> np.ndarray:
    """Returns `[n]` integers proportional to the shares, rounded if necessary."""
    common = math.lcm(*(share.denominator for share in shares))
    whole = [int(share * common) for share in shares]
    whole = [number // math.gcd(*whole) for number in whole]
    total = sum(whole)
    if total <= _MAX_PERIOD:
        return np.array(whole)
    exact = [number * _MAX_PERIOD / total for number in whole]
    for index, share in enumerate(exact):
        if abs(round(share) - share) > _MAX_ERROR * share:
            raise ValueError(
                f"`weights`: component {index} has {share:.3g} of {_MAX_PERIOD} steps, "
                f"which cannot be rounded to within {_MAX_ERROR:.0%}. Raise its "
                "weight, leave the component out, or choose weights whose ratios are "
                "ratios of small integers."
            )
    return np.array([round(share) for share in exact])


def _assign_turns(parts: list[int], num_turns: int) -> np.ndarray:
    """Returns the member of each of the first turns, by Tijdeman's algorithm.

    Args:
      parts: the turns of each member in a period, positive.
      num_turns: the number of turns, at most a period.
    """
    period, scale = sum(parts), max(2 * len(parts) - 2, 1)
    last = (scale - 1) * period
    chosen = []
    # How much each member has had too little so far, in units of
    # 1 / (period * scale) turns.
    deficit = [0] * len(parts)
    gains = [scale * part for part in parts]
    for _ in range(num_turns):
        deficit = list(map(operator.add, deficit, gains))
        # Among the members with a large enough deficit, the one with the earliest
        # deadline takes the turn.
        first, member = math.inf, -1
        for index, missing in enumerate(deficit):
            if missing >= period:
                deadline = (last - missing) / parts[index]
                if deadline < first:
                    first, member = deadline, index
        deficit[member] -= scale * period
        chosen.append(member)
    return np.array(chosen, np.int64)
