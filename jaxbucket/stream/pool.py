"""The pool of a stream: examples that wait for a row of their bucket, oldest first."""

from __future__ import annotations

import bisect
import collections
from collections.abc import Sequence
from typing import Protocol

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.plan.remainder import flow_remainders
from jaxbucket.stream.reader import Arrival


class Pool(Protocol):
    """What waits for rows, by the buckets of a plan."""

    def __len__(self) -> int: ...

    def put(self, arrival: Arrival) -> None:
        """Adds one that came after all others."""
        ...

    def waiting(self) -> list[Arrival]:
        """Returns all, the oldest first."""
        ...

    def oldest(self) -> tuple[int, int]:
        """Returns the place of the oldest, and its bucket."""
        ...

    def closest(self, rows: Sequence[int], ended: bool) -> int:
        """Returns the bucket that is filled with the least padding.

        Args:
          rows: `[K]`, how many are to be filled of each bucket.
          ended: whether nothing more will come.
        """
        ...

    def rows_left(self) -> list[int]:
        """Returns `[K]` rows of each bucket that would hold all that waits."""
        ...

    def take(self, bucket: int, num_rows: int, overdue: int = 0) -> list[list[Arrival]]:
        """Takes out what fills at most so many rows of a bucket, none of them empty.

        Args:
          bucket: which of the plan.
          num_rows: how many.
          overdue: what came before this place goes first, if it fits.
        """
        ...


class PaddedPool:
    """One example in each row.

    Rows take the oldest examples of their own bucket. Where these are too few, the
    oldest of the longest shorter bucket go up, for their rows would be empty otherwise.
    So do those that are overdue.
    """

    def __init__(self, plan: BucketPlan):
        self._plan = plan
        self._boundaries = plan.boundaries.tolist()
        self._queues = [collections.deque[Arrival]() for _ in plan.buckets]

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def put(self, arrival: Arrival) -> None:
        bucket = bisect.bisect_left(self._boundaries, arrival.length)
        self._queues[bucket].append(arrival)

    def waiting(self) -> list[Arrival]:
        return sorted(
            (arrival for queue in self._queues for arrival in queue),
            key=lambda arrival: arrival.place,
        )

    def oldest(self) -> tuple[int, int]:
        return min((q[0].place, k) for k, q in enumerate(self._queues) if q)

    def closest(self, rows: Sequence[int], ended: bool) -> int:
        full = [len(q) // size for q, size in zip(self._queues, rows, strict=True)]
        most = max(full)
        if most:
            heads = zip(self._queues, full, range(len(full)), strict=True)
            return min((q[0].place, k) for q, number, k in heads if number == most)[1]
        if ended:
            return self._cheapest_rest(rows)
        return min(range(len(rows)), key=lambda k: self._lost(k, rows[k]))

    def _cheapest_rest(self, rows: Sequence[int]) -> int:
        """The first bucket that has a batch where the rest is given at least cost."""
        counts = [len(queue) for queue in self._queues]
        costs = self._plan.costs * rows / self._plan.batch_sizes
        flow = flow_remainders(counts, rows, costs)
        return int((flow.batches > 0).argmax())

    def rows_left(self) -> list[int]:
        return [len(queue) for queue in self._queues]

    def _lost(self, bucket: int, num_rows: int) -> float:
        """The share of a batch that no example needs, were it given now."""
        longest, left, used = self._boundaries[bucket], num_rows, 0
        for k in range(bucket, -1, -1):
            number = min(left, len(self._queues[k]))
            used += number * self._boundaries[k]
            left -= number
        return 1 - used / (num_rows * longest)

    def take(self, bucket: int, num_rows: int, overdue: int = 0) -> list[list[Arrival]]:
        taken: list[list[Arrival]] = []
        queues = self._queues[: bucket + 1]
        while len(taken) < num_rows:
            oldest = min((q for q in queues if q), key=lambda q: q[0].place, default=())
            if not oldest or oldest[0].place >= overdue:
                break
            taken.append([oldest.popleft()])
        for queue in reversed(queues):
            while queue and len(taken) < num_rows:
                taken.append([queue.popleft()])
        return taken
