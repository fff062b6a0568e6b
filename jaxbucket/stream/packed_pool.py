"""The pool of a stream whose rows are packed with several examples."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.stream.pool import Pool, Queue
from jaxbucket.stream.reader import PooledExample


class PackedPool(Pool):
    """A pool for rows that are packed with examples up to T.

    A batch starts with the oldest example that fits. The next is the longest example
    that fits into the rest of the row with best fit (policy "closest"), or the oldest
    one that fits with the policy "first". Overdue examples that fit take precedence.

    Examples are grouped by length, so the time to find the longest that fits does not
    depend on the number of examples.

    Args:
      plan: the shapes of rows.
      max_segments: the largest number of examples in a row.
      best_fit: whether the longest example that fits comes next, or the oldest.
    """

    def __init__(self, plan: BucketPlan, max_segments: int, best_fit: bool):
        self._boundaries: list[int] = plan.boundaries.tolist()
        self._max_segments = max_segments
        self._best_fit = best_fit
        self._by_length: dict[int, Queue] = {}
        # Bit n is set if an example of length n is pending.
        self._bits = 0
        # Lengths by index, the oldest first.
        self._lengths: dict[int, int] = {}
        self._tokens = [0] * len(plan)

    def __len__(self) -> int:
        return len(self._lengths)

    def _queues(self) -> Iterable[Queue]:
        return self._by_length.values()

    def put(self, example: PooledExample) -> None:
        (length,) = example.lengths
        queue = self._by_length.setdefault(length, Queue())
        if not queue:
            self._bits |= 1 << length
        queue.append(example)
        self._lengths[example.index] = length
        self._tokens[self._bucket_of(length)] += length

    def _bucket_of(self, length: int) -> int:
        """Returns the shortest bucket that a length fits in."""
        return bisect.bisect_left(self._boundaries, length)

    def oldest(self) -> tuple[int, int]:
        index, length = next(iter(self._lengths.items()))
        return index, self._bucket_of(length)

    def _oldest_up_to(self, room: int) -> tuple[int, int]:
        """Returns the index and the length of the oldest example that fits."""
        return next(item for item in self._lengths.items() if item[1] <= room)

    def first_bucket(self) -> int:
        if not self._bits:
            return len(self._boundaries)
        shortest = (self._bits & -self._bits).bit_length() - 1
        return self._bucket_of(shortest)

    def closest(self, rows: Sequence[int], ended: bool) -> int:
        """Returns the bucket whose examples would fill the largest share of rows."""
        del ended
        sizes = zip(self._tokens, rows, self._boundaries, strict=True)
        full = [tokens / (number * seq_len) for tokens, number, seq_len in sizes]
        return full.index(max(full))

    def rows_needed(self) -> list[int]:
        """Returns the number of the longest rows that hold all examples.

        This is a lower bound, because packed rows may not be filled completely.
        """
        rows = max(
            math.ceil(sum(self._tokens) / self._boundaries[-1]),
            math.ceil(len(self) / self._max_segments),
        )
        return [0] * (len(self._boundaries) - 1) + [rows]

    def take(
        self, bucket: int, num_rows: int, overdue: int = 0
    ) -> list[list[PooledExample]]:
        rows: list[list[PooledExample]] = []
        while len(rows) < num_rows:
            row: list[PooledExample] = []
            room = self._boundaries[bucket]
            while len(row) < self._max_segments:
                example = self._take_one(room, overdue, not (rows or row))
                if example is None:
                    break
                row.append(example)
                room -= example.num_tokens
            if not row:
                break
            rows.append(row)
        return rows

    def _take_one(
        self, room: int, overdue: int, is_first: bool
    ) -> PooledExample | None:
        """Removes the oldest or the longest example of at most `room` positions."""
        fitting = self._bits & ((2 << room) - 1)
        if not fitting:
            return None
        length = fitting.bit_length() - 1
        if is_first or not self._best_fit:
            _, length = self._oldest_up_to(room)
        elif next(iter(self._lengths)) < overdue:
            index, oldest = self._oldest_up_to(room)
            length = oldest if index < overdue else length
        queue = self._by_length[length]
        example = queue.popleft()
        if not queue:
            del self._by_length[length]
            self._bits ^= 1 << length
        del self._lengths[example.index]
        self._tokens[self._bucket_of(length)] -= length
        return example
