"""Reads the examples of a stream, counts them, and reads them again on resume.

The reader resumes from a *snapshot*: the state of the user's iterator at some example,
and the counts of the examples before. The examples themselves are never saved.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
from typing import Any, NamedTuple

import grain

from jaxbucket.base.notes import Noting
from jaxbucket.data.example import Example, copy_features
from jaxbucket.schedule.example_draws import example_rng
from jaxbucket.stream.examples import ExampleStream
from jaxbucket.stream.loader import add_checksum
from jaxbucket.stream.overlong import ExampleLengths, LengthLimits

# Not None, because a function of the stream without a `return` yields None.
_END = object()
_NOTE = "This is example {1} of epoch {0} of the stream."


@dataclasses.dataclass(slots=True, eq=False)
class PooledExample:
    """An example that fills a row or a segment of a packed row.

    Attributes:
      index: index among all arrived examples.
      lengths: `[Q]`, the lengths of its sequences, sorted by their names.
      example: the example, or a chunk of an example that was split.
      epoch: the epoch of the stream.
      epoch_index: index of the example in its epoch.
    """

    index: int
    lengths: ExampleLengths
    example: Example
    epoch: int
    epoch_index: int

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


@dataclasses.dataclass
class StreamCounts:
    """How far a stream has been read, and the numbers of overlong examples.

    Attributes:
      read: examples that were read.
      arrived: examples to be put into rows. Dropped examples do not count, and each
        chunk of a split example counts.
      dropped: overlong examples that were dropped.
      truncated: overlong examples that were truncated.
      truncated_tokens: positions removed by truncation.
      split: overlong examples that were split.
      checksum: the checksum of the arrived examples, which shows whether a stream has
        changed.
      ended: whether the stream has ended.
    """

    read: int = 0
    arrived: int = 0
    dropped: int = 0
    truncated: int = 0
    truncated_tokens: int = 0
    split: int = 0
    checksum: int = 0
    ended: bool = False


class Snapshot(NamedTuple):
    """A point from which the stream can be read again.

    Attributes:
      epoch: the epoch of the next example.
      epoch_index: index of the next example in its epoch.
      counts: the counts of all examples before it.
      state: the state of the user's iterator.
    """

    epoch: int
    epoch_index: int
    counts: StreamCounts
    state: Any


@dataclasses.dataclass(eq=False)
class StreamReader:
    """Reads the epochs of a stream one after the other."""

    examples: ExampleStream
    limits: LengthLimits  # The lengths to keep.
    part: int = 0  # The first part of the rows that this process fills.
    snapshot_every: int = 2**62  # Arrived examples between two snapshots.
    allow_empty: bool = False  # Whether an epoch may have no example.

    def __post_init__(self):
        self.counts = StreamCounts()
        self._epoch = self._epoch_index = 0
        self._epoch_has_example = False
        self._iterator: grain.DatasetIterator[Example] | None = None
        self._snapshots: collections.deque[Snapshot] = collections.deque()

    def read(self) -> list[PooledExample]:
        """Reads an example and returns it, or its chunks; an empty list at the end."""
        while not self.counts.ended:
            origin = (self._epoch, self._epoch_index)
            with Noting(_NOTE.format(*origin)):
                self._take_snapshot_if_due()
                example: Any = next(self._opened(), _END)
                if example is _END:
                    rows = []
                else:
                    example = self._transformed(example, *origin)
                    rows = self.limits.apply(example, self.counts)
            if example is _END:
                self._end_epoch()
                continue
            self._epoch_index += 1
            self.counts.read += 1
            first = self.counts.arrived
            self.counts.arrived += len(rows)
            if rows:
                self._epoch_has_example = True
                for _, row in rows:
                    self.counts.checksum = add_checksum(self.counts.checksum, row)
                return [
                    PooledExample(index, lengths, row, *origin)
                    for index, (lengths, row) in enumerate(rows, first)
                ]
        return []

    def _transformed(self, example: Example, epoch: int, index: int) -> Example:
        """Returns an example of an epoch after the transform, if there is one."""
        transform = self.examples.transform
        if transform is None:
            return example
        rng = example_rng(self.examples.seed, self.part, epoch, index)
        # A copy, because the stream may reuse its arrays.
        return transform(copy_features(example), rng)

    def _opened(self) -> grain.DatasetIterator[Example]:
        if self._iterator is None:
            self._iterator = iter(self.examples.epoch_dataset(self._epoch))
        return self._iterator

    def _end_epoch(self) -> None:
        if not (self._epoch_has_example or self.allow_empty):
            plan = self.limits.plan
            kept = f" that is kept under `overlong={plan.overlong!r}`" if plan else ""
            raise ValueError(
                f"Epoch {self._epoch} of the stream has no example{kept}. Check its "
                "source."
            )
        if self._epoch + 1 == self.examples.num_epochs:
            self.counts.ended = True
            return
        self.close()
        self._epoch += 1
        self._epoch_index = 0
        self._epoch_has_example = False

    def first_example(self, default: Example | None = None) -> Example:
        """Reads the first example by a new iterator.

        Args:
          default: the result if there is no example.
        """
        with Noting(_NOTE.format(0, 0)):
            iterator = iter(self.examples.epoch_dataset(0))
            example: Any = next(iterator, _END)
            iterator.close()
            if example is not _END:
                return copy_features(self._transformed(example, 0, 0))
        if default is None:
            raise ValueError(
                "`like` is missing, and the stream of this process has no example, "
                "whose features empty rows need. Pass `ExampleStream(..., like=...)`."
            )
        return default

    def _take_snapshot_if_due(self) -> None:
        last = self._snapshots[-1] if self._snapshots else None
        origin = (self._epoch, self._epoch_index)
        if last is not None:
            # Arrivals count, because any number of examples may be dropped in between.
            every = self.snapshot_every
            is_due = self.counts.arrived // every != last.counts.arrived // every
            if last[:2] == origin or (self._epoch_index and not is_due):
                return
            if len(self._snapshots) > 1 and last.counts.arrived == self.counts.arrived:
                # No example arrived in between, so the new one replaces the last one.
                self._snapshots.pop()
        state = copy.deepcopy(self._opened().get_state())
        self._snapshots.append(Snapshot(*origin, copy.copy(self.counts), state))

    def snapshot(self, index: int, read: int) -> Snapshot:
        """Returns the latest snapshot from which an example can be read again.

        Args:
          index: the index of the example among all arrived examples.
          read: the number of examples that had been read. Snapshots with this count or
            a larger one are too late.
        """
        if not self._snapshots:
            self._take_snapshot_if_due()
        latest = self._snapshots[0]
        for snapshot in self._snapshots:
            if snapshot.counts.arrived > index or snapshot.counts.read >= read:
                break
            latest = snapshot
        return latest

    def forget(self, index: int, read: int) -> None:
        """Deletes snapshots that are needed only for examples before `index`."""
        needed = self.snapshot(index, read)
        while self._snapshots[0] is not needed:
            self._snapshots.popleft()

    def restore(self, snapshot: Snapshot) -> None:
        """Moves a new reader to a snapshot."""
        self._epoch, self._epoch_index = snapshot.epoch, snapshot.epoch_index
        self._epoch_has_example = snapshot.epoch_index > 0
        with Noting(_NOTE.format(self._epoch, self._epoch_index)):
            self._opened().set_state(copy.deepcopy(snapshot.state))
        self.counts = copy.copy(snapshot.counts)
        self._snapshots.append(snapshot)

    def close(self) -> None:
        """Closes the user's iterator."""
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None
