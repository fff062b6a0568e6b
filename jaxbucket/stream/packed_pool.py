"""The pool of a stream whose rows hold several examples."""

from __future__ import annotations

import bisect
import collections
import math
from collections.abc import Sequence

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.stream.reader import Arrival


class PackedPool:
    """Rows that are filled up to T.

    A batch begins with the oldest example that fits in. What comes behind it is the
    longest that fits in what room is left ("closest", best fit), or the oldest that
    does ("first", greedy, and wherever that is overdue).

    What waits is kept by length, so that finding it takes as long as T has bits, or
    words of 64 bits, and not as there are examples.

    Args:
      plan: the shapes of rows.
      max_segments: the most examples of a row.
      best_fit: whether the longest that fits comes next, or the oldest.
    """

    def __init__(self, plan: BucketPlan, max_segments: int, best_fit: bool):
        self._boundaries = plan.boundaries.tolist()
        self._max_segments = max_segments
        self._best_fit = best_fit
        self._by_length: dict[int, collections.deque[Arrival]] = {}
        # Bit n is set where something of length n waits.
        self._bits = 0
        self._earliest = _Earliest(plan.max_seq_len)
        self._lengths: dict[int, int] = {}
        self._tokens = [0] * len(plan)

    def __len__(self) -> int:
        return len(self._lengths)

    def put(self, arrival: Arrival) -> None:
        queue = self._by_length.setdefault(arrival.length, collections.deque())
        if not queue:
            self._bits |= 1 << arrival.length
            self._earliest.put(arrival.length, arrival.place)
        queue.append(arrival)
        self._lengths[arrival.place] = arrival.length
        self._tokens[self._bucket(arrival.length)] += arrival.length

    def waiting(self) -> list[Arrival]:
        return sorted(
            (arrival for queue in self._by_length.values() for arrival in queue),
            key=lambda arrival: arrival.place,
        )

    def oldest(self) -> tuple[int, int]:
        place = self._earliest.up_to(self._boundaries[-1])
        return int(place), self._bucket(self._lengths[int(place)])

    def closest(self, rows: Sequence[int], ended: bool) -> int:
        """Returns the bucket of whose rows the most can be filled by what it has."""
        del ended
        full = [
            tokens / (size * longest)
            for tokens, size, longest in zip(
                self._tokens, rows, self._boundaries, strict=True
            )
        ]
        return full.index(max(full))

    def rows_left(self) -> list[int]:
        """Returns how many of the longest rows hold all; a row more may be needed."""
        rows = max(
            math.ceil(sum(self._tokens) / self._boundaries[-1]),
            math.ceil(len(self) / self._max_segments),
        )
        return [0] * (len(self._boundaries) - 1) + [rows]

    def take(self, bucket: int, num_rows: int, overdue: int = 0) -> list[list[Arrival]]:
        longest = self._boundaries[bucket]
        rows: list[list[Arrival]] = []
        while len(rows) < num_rows:
            row: list[Arrival] = []
            room = longest
            while len(row) < self._max_segments:
                oldest = not self._best_fit or not (rows or row)
                oldest = oldest or self._earliest.up_to(room) < overdue
                arrival = self._take_one(room, oldest)
                if arrival is None:
                    break
                row.append(arrival)
                room -= arrival.length
            if not row:
                break
            rows.append(row)
        return rows

    def _take_one(self, room: int, oldest: bool) -> Arrival | None:
        """Takes out the oldest, or the longest, that is at most so long."""
        fitting = self._bits & ((2 << room) - 1)
        if not fitting:
            return None
        length = fitting.bit_length() - 1
        if oldest:
            length = self._lengths[int(self._earliest.up_to(room))]
        queue = self._by_length[length]
        arrival = queue.popleft()
        if queue:
            self._earliest.put(length, queue[0].place)
        else:
            del self._by_length[length]
            self._bits ^= 1 << length
            self._earliest.put(length, math.inf)
        del self._lengths[arrival.place]
        self._tokens[self._bucket(length)] -= length
        return arrival

    def _bucket(self, length: int) -> int:
        return bisect.bisect_left(self._boundaries, length)


class _Earliest:
    """The oldest place of each length; and of all lengths up to one, by a tree."""

    def __init__(self, longest: int):
        self._size = 1 << longest.bit_length()
        self._tree = [math.inf] * (2 * self._size)

    def put(self, length: int, place: float) -> None:
        tree, node = self._tree, self._size + length
        tree[node] = place
        while node > 1:
            node //= 2
            tree[node] = min(tree[2 * node], tree[2 * node + 1])

    def up_to(self, length: int) -> float:
        """Returns the oldest place of all lengths that are at most so long."""
        tree, node = self._tree, self._size + length
        found = tree[node]
        while node > 1:
            if node % 2:
                found = min(found, tree[node - 1])
            node //= 2
        return found
