"""`Turns`: which component of a mixture has which turn."""

from __future__ import annotations

import bisect
import itertools
import math
import operator
from collections.abc import Sequence
from fractions import Fraction

from jaxbucket.schedule.spread import item_at, occurrences


class Turns:
    """Turns in proportion to shares, which may change. Members go on where they were.

    In a `Mixture`, the members are its components, and a turn is one of their steps.

    The turns of each member are evenly spread, as `item_at` does it: after any
    number of turns since a change, a member has had its share with an error of less
    than two turns, and typically less than one.

    Example:
      >>> half, quarter = Fraction(1, 2), Fraction(1, 4)
      >>> turns = Turns([0, 4], [[half, half], [1 - quarter, quarter]])
      >>> [turns.at(turn) for turn in range(8)]
      [(1, 0), (0, 0), (1, 1), (0, 1), (0, 2), (0, 3), (1, 2), (0, 4)]

    Args:
      starts: the turns from which the shares hold, ascending from 0.
      shares: for each of them, `[n]` numbers, of which some may be 0.
    """

    def __init__(self, starts: Sequence[int], shares: Sequence[Sequence[Fraction]]):
        self._starts = list(starts)
        self._counts = list(map(_whole, shares))
        # The number of turns of each member before each start.
        self._before = [[0] * len(shares[0])]
        for (start, end), counts in zip(
            itertools.pairwise(starts), self._counts, strict=False
        ):
            turns = occurrences(end - start, counts)
            self._before.append(list(map(operator.add, self._before[-1], turns)))

    def before(self, turn: int) -> list[int]:
        """Returns the number of turns of each member before a turn."""
        index = bisect.bisect_right(self._starts, turn) - 1
        since = occurrences(turn - self._starts[index], self._counts[index])
        return list(map(operator.add, self._before[index], since))

    def at(self, turn: int) -> tuple[int, int]:
        """Returns the member of a turn, and the number of its earlier turns."""
        index = bisect.bisect_right(self._starts, turn) - 1
        member, since = item_at(turn - self._starts[index], self._counts[index])
        return member, self._before[index][member] + since

    def until(self, member: int, count: int) -> int | None:
        """Returns the number of turns after which a member has had `count` >= 1.

        It is None if the member never has as many.
        """
        enough = self._starts[-1] + 1
        if not self._counts[-1][member] and self.before(enough)[member] < count:
            return None
        while self.before(enough)[member] < count:
            enough *= 2
        turns = range(enough)
        return bisect.bisect_left(turns, count, key=lambda x: self.before(x)[member])


def _whole(shares: Sequence[Fraction]) -> tuple[int, ...]:
    """Returns `[n]` integers in proportion to the shares."""
    common = math.lcm(*(share.denominator for share in shares))
    return tuple(int(share * common) for share in shares)
