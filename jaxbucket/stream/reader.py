"""Reads the examples of a stream, counts them, and reads them again on resume.

The reader resumes from a *snapshot*: the state of the user's iterator at some example,
and the counts of the examples before. The examples themselves are never saved.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import traceback
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import grain
import numpy as np

from jaxbucket.base.checks import with_article
from jaxbucket.data.example import Example
from jaxbucket.data.transform import StreamTransform
from jaxbucket.stream.epochs import stream_of
from jaxbucket.stream.loader_stream import rewind
from jaxbucket.stream.overlong import ExampleLengths, LengthLimits

# Not None, because a function of the stream without a `return` yields None.
END = object()


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

    @property
    def origin(self) -> str:
        return _origin(self.epoch, self.epoch_index)

    def without_arrays(self) -> PooledExample:
        origin = (self.epoch, self.epoch_index)
        return PooledExample(self.index, self.lengths, {}, *origin)


@dataclasses.dataclass
class StreamCounts:
    """The numbers of examples read from a stream, and of overlong examples.

    Attributes:
      read: examples that were read.
      arrived: examples to be put into rows. Dropped examples do not count, and each
        chunk of a split example counts.
      dropped: overlong examples that were dropped.
      truncated: overlong examples that were truncated.
      truncated_tokens: positions removed by truncation.
      split: overlong examples that were split.
    """

    read: int = 0
    arrived: int = 0
    dropped: int = 0
    truncated: int = 0
    truncated_tokens: int = 0
    split: int = 0


class Snapshot(NamedTuple):
    """A point from which the stream can be read again.

    Attributes:
      epoch: the epoch of the next example.
      epoch_index: index of the next example in its epoch.
      counts: the counts of all examples before it.
      checksum: the checksum of all examples before it.
      state: the state of the user's iterator.
    """

    epoch: int
    epoch_index: int
    counts: StreamCounts
    checksum: int
    state: Any


@dataclasses.dataclass(eq=False)
class StreamReader:
    """Reads the epochs of a stream one after the other."""

    open_epoch: Callable[[int], grain.IterDataset]
    num_epochs: int | None  # None to repeat the stream forever.
    limits: LengthLimits  # The lengths to keep.
    transform: StreamTransform
    snapshot_every: int  # The number of arrived examples between two snapshots.
    allow_empty: bool = False  # Whether an epoch may have no example.

    def __post_init__(self):
        self.counts = StreamCounts()
        # The checksum of all arrived examples, which detects a stream that has changed.
        self.checksum = 0
        self.ended = False
        # The number of examples to read again, in as many epochs as they were read in.
        self._num_again = 0
        self._epoch = self._epoch_index = 0
        self._epoch_has_example = False
        self._iterator: grain.DatasetIterator[Example] | None = None
        self._snapshots: collections.deque[Snapshot] = collections.deque()

    def read(self) -> list[PooledExample]:
        """Reads an example and returns it, or its chunks; an empty list at the end.

        Raises:
          RuntimeError: if the example cannot be read, naming the example.
          ValueError: if the example is too long, or an epoch has no example.
        """
        while not self.ended:
            example = self._next_example()
            if example is END:
                self._end_epoch()
                continue
            origin = (self._epoch, self._epoch_index)
            try:
                example = self.transform.apply(example, *origin)
                rows = self.limits.apply(example, self.counts)
            except ValueError as error:
                # The cause is the error that the transform raised, if any.
                raise ValueError(f"{_origin(*origin)}: {error}") from error.__cause__
            self._epoch_index += 1
            self.counts.read += 1
            first = self.counts.arrived
            self.counts.arrived += len(rows)
            if rows:
                self._epoch_has_example = True
                for _, row in rows:
                    self.checksum = add_checksum(self.checksum, row)
                return [
                    PooledExample(index, lengths, row, *origin)
                    for index, (lengths, row) in enumerate(rows, first)
                ]
        return []

    def _next_example(self) -> Any:
        """Returns the next example of this epoch; `END` after the last one."""
        iterator, every = self._opened(), self.snapshot_every
        last = self._snapshots[-1].counts.arrived if self._snapshots else 0
        # Arrivals count, because any number of examples may be dropped in between.
        if self._epoch_index == 0 or self.counts.arrived // every != last // every:
            self._take_snapshot()
        return next_of(iterator, _origin(self._epoch, self._epoch_index))

    def _opened(self) -> grain.DatasetIterator[Example]:
        if self._iterator is None:
            self._iterator = self._iterator_of(self._epoch)
        return self._iterator

    def _iterator_of(self, epoch: int) -> grain.DatasetIterator[Example]:
        try:
            dataset = self.open_epoch(epoch)
        # Includes StopIteration, which would look like the end of the stream.
        except Exception as error:
            raise RuntimeError(
                f"Epoch {epoch} of the stream cannot be opened: "
                f"{type(error).__name__}: {error}"
            ) from error
        if not isinstance(dataset, grain.IterDataset):
            raise ValueError(
                f"Epoch {epoch} of the stream is {with_article(dataset)}, not a "
                f"`grain.IterDataset`. Return {stream_of(dataset)} from the function."
            )
        self.dataset = dataset
        return iter(dataset)

    def _end_epoch(self) -> None:
        if not (self._epoch_has_example or self.allow_empty):
            raise ValueError(
                f"Epoch {self._epoch} of the stream has no example, or none that is "
                "kept, so there is nothing to train on. Check its source, its filters "
                f"and `overlong={self.limits.overlong!r}`."
            )
        is_last = self.num_epochs is not None and self._epoch + 1 >= self.num_epochs
        if is_last and self.counts.read >= self._num_again:
            self.ended = True
            return
        self.close()
        self._iterator = None
        self._epoch += 1
        self._epoch_index = 0
        self._epoch_has_example = False

    def first_example(self) -> Example | None:
        """Reads the first example by a new iterator; returns None if there is none.

        Raises:
          RuntimeError: if the example cannot be read.
          ValueError: if the example cannot be transformed.
        """
        iterator, origin = self._iterator_of(0), _origin(0, 0)
        try:
            example = next_of(iterator, origin)
            return None if example is END else self.transform.apply(example, 0, 0)
        except ValueError as error:
            raise ValueError(f"{origin}: {error}") from error.__cause__
        finally:
            iterator.close()
            rewind(self.dataset)

    def _take_snapshot(self) -> None:
        last = self._snapshots[-1] if self._snapshots else None
        if last and (last.epoch, last.epoch_index) == (self._epoch, self._epoch_index):
            return
        state = copy.deepcopy(self._opened().get_state())
        counts = dataclasses.replace(self.counts)
        if len(self._snapshots) > 1 and last and last.counts.arrived == counts.arrived:
            # No example arrived in between, so the new snapshot replaces the last one.
            self._snapshots.pop()
        origin = (self._epoch, self._epoch_index)
        self._snapshots.append(Snapshot(*origin, counts, self.checksum, state))

    def snapshot(self, index: int, read: int) -> Snapshot:
        """Returns the latest snapshot from which an example can be read again.

        Args:
          index: the index of the example among all arrived examples.
          read: the number of examples that had been read. Snapshots with this count or
            a larger one are too late.
        """
        if not self._snapshots:
            self._take_snapshot()
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

    def restore(self, snapshot: Snapshot, read: int) -> None:
        """Moves a new reader to a snapshot.

        Args:
          snapshot: the snapshot.
          read: the number of examples that had been read when the state was saved.

        Raises:
          ValueError: if the stream rejects the state.
        """
        self._epoch, self._epoch_index = snapshot.epoch, snapshot.epoch_index
        self._epoch_has_example = snapshot.epoch_index > 0
        iterator = self._opened()
        try:
            iterator.set_state(copy.deepcopy(snapshot.state))
        except Exception as error:
            raise ValueError(
                f"The stream rejects its own state at example {snapshot.epoch_index} "
                f"of epoch {snapshot.epoch}: {type(error).__name__}: "
                f"{str(error).rstrip('.')}. Pass the stream that the state was saved "
                "from, or restore an earlier checkpoint."
            ) from error
        self.counts = dataclasses.replace(snapshot.counts)
        self.checksum, self._num_again = snapshot.checksum, read
        self._snapshots.append(snapshot)

    def close(self) -> None:
        """Closes the user's iterator."""
        if self._iterator is not None:
            self._iterator.close()


def _origin(epoch: int, epoch_index: int) -> str:
    return f"Example {epoch_index} of epoch {epoch} of the stream"


def next_of(iterator: grain.DatasetIterator[Example], origin: str) -> Any:
    """Returns the next example; `END` after the last one.

    Raises:
      RuntimeError: if the example cannot be read, naming the example.
    """
    try:
        return next(iterator)
    except StopIteration as error:
        # A StopIteration from a user's function must not end the stream.
        if not _is_from_function(error):
            return END
        raise RuntimeError(
            f"{origin} cannot be read: a function of the stream raised StopIteration, "
            "which would look like the end of the stream. Catch it in the function, "
            "or pass a default to `next`."
        ) from None
    except Exception as error:
        raise RuntimeError(
            f"{origin} cannot be read: {type(error).__name__}: {error}"
        ) from error


def _is_from_function(error: StopIteration) -> bool:
    """Whether a user's function raised the error, and not an iterator."""
    callers = []
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        if module != __name__ and module.split(".")[0] not in ("grain", "concurrent"):
            callers.append(frame.f_code.co_name)
    return bool(callers) and "__next__" not in callers


def add_checksum(checksum: int, example: Example) -> int:
    """Returns the checksum of the examples before, and of the numbers of this one."""
    for name in sorted(example):
        array = np.ascontiguousarray(example[name])
        checksum = zlib.crc32(f"{name} {array.shape}".encode(), checksum)
        # The bytes of strings and objects may differ between runs. "V" is bfloat16.
        if array.dtype.kind in "biufcV" and not array.dtype.hasobject:
            checksum = zlib.crc32(array.view(np.uint8).data, checksum)
    return checksum
