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

    Examples are grouped by length, so the time to find one depends on the number of
    bits or 64-bit words of T, and not on the number of examples.

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
        self._oldest = _OldestIndex(plan.max_seq_len)
        # Lengths by index.
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
            self._oldest.put(length, example.index)
        queue.append(example)
        self._lengths[example.index] = length
        self._tokens[self._bucket_of(length)] += length

    def _bucket_of(self, length: int) -> int:
        """Returns the shortest bucket that a length fits in."""
        return bisect.bisect_left(self._boundaries, length)

    def oldest(self) -> tuple[int, int]:
        index = int(self._oldest.up_to(self._boundaries[-1]))
        return index, self._bucket_of(self._lengths[index])

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
                is_first = not (rows or row)
                oldest = not self._best_fit or is_first
                oldest = oldest or self._oldest.up_to(room) < overdue
                example = self._take_one(room, oldest)
                if example is None:
                    break
                row.append(example)
                room -= example.num_tokens
            if not row:
                break
            rows.append(row)
        return rows

    def _take_one(self, room: int, oldest: bool) -> PooledExample | None:
        """Removes the oldest or the longest example of at most `room` positions."""
        fitting = self._bits & ((2 << room) - 1)
        if not fitting:
            return None
        length = fitting.bit_length() - 1
        if oldest:
            length = self._lengths[int(self._oldest.up_to(room))]
        queue = self._by_length[length]
        example = queue.popleft()
        if queue:
            self._oldest.put(length, queue[0].index)
        else:
            del self._by_length[length]
            self._bits ^= 1 << length
            self._oldest.put(length, math.inf)
        del self._lengths[example.index]
        self._tokens[self._bucket_of(length)] -= length
        return example


class _OldestIndex:
    """A segment tree of the oldest index of each length."""

    def __init__(self, max_length: int):
        self._size = 1 << max_length.bit_length()
        self._tree = [math.inf] * (2 * self._size)

    def put(self, length: int, index: float) -> None:
        tree, node = self._tree, self._size + length
        tree[node] = index
        while node > 1:
            node //= 2
            tree[node] = min(tree[2 * node], tree[2 * node + 1])

    def up_to(self, length: int) -> float:
        """Returns the oldest index of all lengths that are at most `length`."""
        tree, node = self._tree, self._size + length
        oldest = tree[node]
        while node > 1:
            if node % 2:
                oldest = min(oldest, tree[node - 1])
            node //= 2
        return oldest
