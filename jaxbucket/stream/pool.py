"""The pool of a stream: the examples that are waiting for a row of a batch."""

from __future__ import annotations

import abc
import bisect
import collections
import math
import operator
from collections.abc import Iterable, Sequence

import numpy as np

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.plan.flow.remainder import epoch_flow
from jaxbucket.stream.drain import fill_order
from jaxbucket.stream.overlong import ExampleLengths
from jaxbucket.stream.reader import PooledExample

Queue = collections.deque[PooledExample]


class Pool(abc.ABC):
    """Pending examples, grouped by the buckets of a plan."""

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def _queues(self) -> Iterable[Queue]:
        """Returns the queues that hold the pending examples."""

    @abc.abstractmethod
    def put(self, example: PooledExample) -> None:
        """Adds an example, which must be newer than all others."""

    @abc.abstractmethod
    def oldest(self) -> tuple[int, int]:
        """Returns the index of the oldest example and its bucket."""

    @abc.abstractmethod
    def first_bucket(self) -> int:
        """Returns the first bucket that has an example; K if the pool is empty."""

    @abc.abstractmethod
    def closest(self, rows: Sequence[int], ended: bool) -> int:
        """Returns the bucket that the policy "closest" chooses.

        Args:
          rows: `[K]`, the number of rows to fill in each bucket.
          ended: whether the stream has ended.
        """

    @abc.abstractmethod
    def rows_needed(self) -> list[int]:
        """Returns the `[K]` rows that would hold all pending examples."""

    @abc.abstractmethod
    def take(
        self, bucket: int, num_rows: int, overdue: int = 0
    ) -> list[list[PooledExample]]:
        """Removes and returns the examples of at most `num_rows` rows, none empty.

        Args:
          bucket: the bucket of the rows.
          num_rows: the largest number of rows.
          overdue: examples with a lower index take precedence if they fit.
        """

    def pending(self) -> list[PooledExample]:
        """Returns all examples, the oldest first."""
        examples = (example for queue in self._queues() for example in queue)
        return sorted(examples, key=lambda example: example.index)


class PaddedPool(Pool):
    """A pool for rows that hold one example each.

    Overdue examples that fit take the first rows. The oldest examples of the bucket
    follow. Rows that are still empty take the oldest examples of the next shorter
    bucket, and so on. With several sequences, shorter buckets are those with a smaller
    sum of T, and the bucket must be at least as long in every sequence.

    The policy "closest" chooses the bucket with the most full batches. If there are
    none, it chooses the bucket with the least unused space, or, after the end of the
    stream, the first of the cheapest batches for all pending examples.

    Args:
      plan: the shapes of rows.
    """

    def __init__(self, plan: BucketPlan):
        self._plan = plan
        self._buckets = [Queue() for _ in plan.buckets]
        self._fill_order = fill_order(plan)
        self._row_sizes: list[int] = plan.tokens_per_row.tolist()
        shapes = list(enumerate(map(tuple, plan.seq_lens.tolist())))
        if plan.sequences:
            # As in `BucketPlan.assign`, the bucket with the cheapest row comes first.
            shapes = [shapes[k] for k in np.argsort(plan.row_costs, kind="stable")]
        self._shapes = shapes

    def __len__(self) -> int:
        return sum(map(len, self._buckets))

    def _queues(self) -> list[Queue]:
        return self._buckets

    def put(self, example: PooledExample) -> None:
        self._buckets[self._bucket_of(example.lengths)].append(example)

    def _bucket_of(self, lengths: ExampleLengths) -> int:
        return next(
            k for k, shape in self._shapes if all(map(operator.le, lengths, shape))
        )

    def oldest(self) -> tuple[int, int]:
        return min((q[0].index, k) for k, q in enumerate(self._buckets) if q)

    def first_bucket(self) -> int:
        filled = (k for k, queue in enumerate(self._buckets) if queue)
        return next(filled, len(self._buckets))

    def closest(self, rows: Sequence[int], ended: bool) -> int:
        full = [len(q) // size for q, size in zip(self._buckets, rows, strict=True)]
        if most := max(full):
            fullest = [k for k, number in enumerate(full) if number == most]
            return min(fullest, key=lambda k: self._buckets[k][0].index)
        if ended:
            # The shortest bucket of the cheapest batches for all examples.
            costs = self._plan.costs * rows / self._plan.batch_sizes
            flow = epoch_flow(self._plan, self.rows_needed(), rows, costs)
            return int((flow.batches > 0).argmax())
        return min(range(len(rows)), key=lambda k: self._unused(k, rows[k]))

    def rows_needed(self) -> list[int]:
        return [len(queue) for queue in self._buckets]

    def _unused(self, bucket: int, num_rows: int) -> float:
        """Returns the share of positions that stay unused if the bucket is served now.

        The length of an example counts as the T of its own bucket.
        """
        positions, empty = 0, num_rows
        for k in self._fill_order[bucket]:
            number = min(empty, len(self._buckets[k]))
            positions += number * self._row_sizes[k]
            empty -= number
        return 1 - positions / (num_rows * self._row_sizes[bucket])

    def take(
        self, bucket: int, num_rows: int, overdue: int = 0
    ) -> list[list[PooledExample]]:
        rows: list[list[PooledExample]] = []
        queues = [self._buckets[k] for k in self._fill_order[bucket]]
        while len(rows) < num_rows:
            oldest = min((q for q in queues if q), key=lambda q: q[0].index, default=())
            if not oldest or oldest[0].index >= overdue:
                break
            rows.append([oldest.popleft()])
        for queue in queues:
            while queue and len(rows) < num_rows:
                rows.append([queue.popleft()])
        return rows


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
