"""The pool of a stream: the examples that are waiting for a row of a batch."""

from __future__ import annotations

import abc
import bisect
import collections
from collections.abc import Iterable, Sequence

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.plan.flow.remainder import flow_remainders
from jaxbucket.stream.reader import PooledExample

Queue = collections.deque[PooledExample]


class Pool(abc.ABC):
    """Pending examples, grouped by the buckets of a plan.

    Args:
      plan: the shapes of rows.
    """

    def __init__(self, plan: BucketPlan):
        self._boundaries: list[int] = plan.boundaries.tolist()

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

    def bucket_of(self, length: int) -> int:
        """Returns the shortest bucket that a length fits in."""
        return bisect.bisect_left(self._boundaries, length)


class PaddedPool(Pool):
    """A pool for rows that hold one example each.

    Overdue examples that fit take the first rows. The oldest examples of the bucket
    follow. Rows that are still empty take the oldest examples of the next shorter
    bucket, and so on.

    The policy "closest" chooses the bucket with the most full batches. If there are
    none, it chooses the bucket with the least unused space, or, after the end of the
    stream, the first of the cheapest batches for all pending examples.
    """

    def __init__(self, plan: BucketPlan):
        super().__init__(plan)
        self._plan = plan
        self._buckets = [Queue() for _ in plan.buckets]

    def __len__(self) -> int:
        return sum(map(len, self._buckets))

    def _queues(self) -> list[Queue]:
        return self._buckets

    def put(self, example: PooledExample) -> None:
        self._buckets[self.bucket_of(example.length)].append(example)

    def oldest(self) -> tuple[int, int]:
        return min((q[0].index, k) for k, q in enumerate(self._buckets) if q)

    def closest(self, rows: Sequence[int], ended: bool) -> int:
        full = [len(q) // size for q, size in zip(self._buckets, rows, strict=True)]
        if most := max(full):
            fullest = [k for k, number in enumerate(full) if number == most]
            return min(fullest, key=lambda k: self._buckets[k][0].index)
        if ended:
            return self._cheapest_of_remainder(rows)
        return min(range(len(rows)), key=lambda k: self._unused(k, rows[k]))

    def _cheapest_of_remainder(self, rows: Sequence[int]) -> int:
        """Returns the shortest bucket of the cheapest batches for all examples."""
        costs = self._plan.costs * rows / self._plan.batch_sizes
        flow = flow_remainders(self.rows_needed(), rows, costs)
        return int((flow.batches > 0).argmax())

    def rows_needed(self) -> list[int]:
        return [len(queue) for queue in self._buckets]

    def _unused(self, bucket: int, num_rows: int) -> float:
        """Returns the share of positions that stay unused if the bucket is served now.

        The length of an example counts as the T of its own bucket.
        """
        positions, empty = 0, num_rows
        for k in range(bucket, -1, -1):
            number = min(empty, len(self._buckets[k]))
            positions += number * self._boundaries[k]
            empty -= number
        return 1 - positions / (num_rows * self._boundaries[bucket])

    def take(
        self, bucket: int, num_rows: int, overdue: int = 0
    ) -> list[list[PooledExample]]:
        rows: list[list[PooledExample]] = []
        queues = self._buckets[: bucket + 1]
        while len(rows) < num_rows:
            oldest = min((q for q in queues if q), key=lambda q: q[0].index, default=())
            if not oldest or oldest[0].index >= overdue:
                break
            rows.append([oldest.popleft()])
        for queue in reversed(queues):
            while queue and len(rows) < num_rows:
                rows.append([queue.popleft()])
        return rows
