"""The examples of a stream as they come: cut, counted, and found again after a resume.

Where the stream is read from again, it is from a *snapshot*: the state of the user's
iterator at some example, beside what had come until then. Examples themselves are never
kept.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import traceback
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np

from jaxbucket.base.buckets import Overlong
from jaxbucket.data.example import (
    Example,
    as_arrays,
    common_length,
    copied,
    example_length,
    sequence_names,
)
from jaxbucket.data.transform import StreamTransform

_CHECKED_ONE_IN = 16
# Not None, which a function of the stream returns that forgets to return.
_END = object()


class Arrival(NamedTuple):
    """What fills a row, or a part of a packed one.

    Attributes:
      place: its number, among all that have come.
      length: positions that it has.
      example: a dict of arrays; of one that was split, a chunk of it.
      epoch: of the stream, and
      number: which example of it this is, or is a part of.
      checksum: of what one in 16 holds, by which a stream that changed is known; 0 of
        the others.
    """

    place: int
    length: int
    example: Example
    epoch: int = 0
    number: int = 0
    checksum: int = 0

    @property
    def origin(self) -> str:
        """Where it came from, in words."""
        return _where(self.epoch, self.number)


@dataclasses.dataclass
class StreamCounts:
    """What has been read of a stream, and what was not kept of it.

    Attributes:
      read: examples.
      arrived: what was made of them to be put into rows: each example is one, unless
        it is dropped or split.
      dropped: examples left out as too long.
      truncated: examples cut as too long.
      truncated_tokens: positions cut off from them.
      split: examples split as too long.
    """

    read: int = 0
    arrived: int = 0
    dropped: int = 0
    truncated: int = 0
    truncated_tokens: int = 0
    split: int = 0


class Snapshot(NamedTuple):
    """From where the stream can be read again.

    Attributes:
      epoch: of the stream.
      number: examples of the epoch that were read before.
      counts: of all epochs, before.
      state: of the user's iterator.
    """

    epoch: int
    number: int
    counts: StreamCounts
    state: Any


class Arrivals:
    """Reads a stream, epoch after epoch.

    Args:
      open_epoch: returns the stream of an epoch.
      num_epochs: None for no end.
      max_seq_len: the longest that arrives.
      overlong: what becomes of longer examples.
      sequences: the features that lengths are of.
      transform: what is made of each example before its length is taken.
      every: of what arrives, from one snapshot to the next.
      may_be_empty: whether an epoch may have nothing that arrives.
    """

    def __init__(
        self,
        open_epoch: Callable[[int], grain.IterDataset],
        num_epochs: int | None,
        max_seq_len: int,
        overlong: Overlong,
        sequences: Sequence[str] | None,
        transform: StreamTransform,
        every: int,
        may_be_empty: bool = False,
    ):
        self._open_epoch = open_epoch
        self._num_epochs = num_epochs
        self._max_seq_len = max_seq_len
        self._overlong = overlong
        self._sequences = sequences
        self._transform = transform
        self._every = every
        self._may_be_empty = may_be_empty
        self._epoch = 0
        self._number = 0
        self._mark = 0
        self._anything = False
        self._iterator: grain.DatasetIterator[Example] | None = None
        self._snapshots: collections.deque[Snapshot] = collections.deque()
        self.counts = StreamCounts()
        self.ended = False

    def read(self) -> list[Arrival]:
        """Reads an example, and returns what arrives by it: nothing at the end.

        Raises:
          RuntimeError: if it cannot be read; it says which it is.
          ValueError: if it is too long, or an epoch has no example.
        """
        while not self.ended:
            example = self._next_example()
            if example is _END:
                self._end_epoch()
                continue
            try:
                example = self._transform.apply(example, self._epoch, self._number)
                length = example_length(example, self._sequences)
                parts = self._parts(example, length)
            except ValueError as error:
                # What the transform raised, if it did.
                raise ValueError(f"{self._where()}: {error}") from error.__cause__
            origin = (self._epoch, self._number)
            self._number += 1
            self.counts.read += 1
            first = self.counts.arrived
            self.counts.arrived += len(parts)
            if parts:
                self._anything = True
                return [
                    Arrival(place, *part, *origin, _checksum(place, part[1]))
                    for place, part in enumerate(parts, first)
                ]
        return []

    def _next_example(self) -> Any:
        """The next of this epoch; `_END` behind its last one."""
        self._open()
        # By what arrived: of examples that are dropped there may be any number.
        mark = self.counts.arrived // self._every
        if self._number == 0 or mark != self._mark:
            self._take_snapshot()
            self._mark = mark
        assert self._iterator is not None
        return _next_of(self._iterator, self._where())

    def _open(self) -> None:
        if self._iterator is None:
            self._iterator = self._begin(self._epoch)

    def _begin(self, epoch: int) -> grain.DatasetIterator[Example]:
        """The stream of an epoch, from its first example."""
        try:
            dataset = self._open_epoch(epoch)
        # That of a function must not be taken for the end of the stream.
        except Exception as error:
            raise RuntimeError(
                f"Epoch {epoch} of the stream cannot be opened: "
                f"{type(error).__name__}: {error}"
            ) from error
        if not isinstance(dataset, grain.IterDataset):
            raise ValueError(
                f"Epoch {epoch} of the stream is a {type(dataset).__name__}, not a "
                "`grain.IterDataset`: let the function return that, such as "
                "`grain.MapDataset.source(...).to_iter_dataset()`."
            )
        return iter(dataset)

    def _take_snapshot(self) -> None:
        assert self._iterator is not None
        state = copy.deepcopy(self._iterator.get_state())
        counts = dataclasses.replace(self.counts)
        last = self._snapshots[-1] if self._snapshots else None
        if last is not None and (last.epoch, last.number) == (
            self._epoch,
            self._number,
        ):
            return
        arrived = None if last is None else last.counts.arrived
        if len(self._snapshots) > 1 and arrived == counts.arrived:
            # Nothing came in between, so it has nothing that this one has not.
            self._snapshots.pop()
        self._snapshots.append(Snapshot(self._epoch, self._number, counts, state))

    def _end_epoch(self) -> None:
        if not (self._anything or self._may_be_empty):
            raise ValueError(
                f"Epoch {self._epoch} of the stream has no example, or none that is "
                "kept: there is nothing to train on. Check its source, its filters and "
                f"`overlong={self._overlong!r}`."
            )
        if self._num_epochs is not None and self._epoch + 1 >= self._num_epochs:
            self.ended = True
            return
        self.close()
        self._iterator = None
        self._epoch += 1
        self._number = 0
        self._anything = False

    def _parts(self, example: Example, length: int) -> list[tuple[int, Example]]:
        """What is made of an example: (length, example) for each row that it needs."""
        longest = self._max_seq_len
        if length <= longest:
            return [(length, copied(example))]
        if self._overlong == "drop":
            self.counts.dropped += 1
            return []
        if self._overlong == "truncate":
            self.counts.truncated += 1
            self.counts.truncated_tokens += length - longest
            return [_cut(example, self._sequences, 0, longest)]
        if self._overlong == "split":
            self.counts.split += 1
            begins = range(0, length, longest)
            return [_cut(example, self._sequences, x, x + longest) for x in begins]
        raise ValueError(
            f"length {length} is beyond the last bucket, `seq_len={longest}`. Plan "
            "with a larger `max_seq_len`, or choose `overlong='drop'`, "
            "`overlong='truncate'` or `overlong='split'`."
        )

    def _where(self) -> str:
        return _where(self._epoch, self._number)

    def snapshot(self, place: int, read: int) -> Snapshot:
        """Returns the latest from which a place, and all behind it, come again.

        Args:
          place: of what arrived.
          read: examples that had been read; later ones have other snapshots.
        """
        if not self._snapshots:
            self._open()
            self._take_snapshot()
        found = self._snapshots[0]
        for later in self._snapshots:
            if later.counts.arrived > place or later.counts.read >= read:
                break
            found = later
        return found

    def forget(self, place: int, read: int) -> None:
        """Forgets snapshots that only places before this one need."""
        needed = self.snapshot(place, read)
        while self._snapshots[0] is not needed:
            self._snapshots.popleft()

    def go_back(self, snapshot: Snapshot) -> None:
        """Goes to where a snapshot was taken."""
        self.close()
        self._epoch, self._number = snapshot.epoch, snapshot.number
        self._anything = snapshot.number > 0
        self._mark = snapshot.counts.arrived // self._every
        self._iterator = self._begin(self._epoch)
        try:
            self._iterator.set_state(copy.deepcopy(snapshot.state))
        except Exception as error:
            raise ValueError(
                f"The stream refuses the state that it was in at example "
                f"{self._number} of epoch {self._epoch}: {type(error).__name__}: "
                f"{error}. Give the stream that it is of, or an earlier checkpoint."
            ) from error
        self.counts = dataclasses.replace(snapshot.counts)
        self._snapshots = collections.deque([snapshot])
        self.ended = False

    def first_example(self) -> Example | None:
        """Reads the first example of all once more; None if there is none.

        Raises:
          RuntimeError: if it cannot be read.
          ValueError: if it cannot be transformed.
        """
        iterator = self._begin(0)
        where = _where(0, 0)
        try:
            example = _next_of(iterator, where)
            return None if example is _END else self._transform.apply(example, 0, 0)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error.__cause__
        finally:
            iterator.close()

    def close(self) -> None:
        """Ends what the user's iterator has begun."""
        if self._iterator is not None:
            self._iterator.close()


def _where(epoch: int, number: int) -> str:
    return f"Example {number} of epoch {epoch} of the stream"


def _next_of(iterator: grain.DatasetIterator[Example], where: str) -> Any:
    """The next example; `_END` behind the last one.

    Raises:
      RuntimeError: if it cannot be read; it says where it is.
    """
    try:
        return next(iterator)
    except StopIteration as end:
        # One of a function of the user's looks like the end.
        if not _is_of_function(end):
            return _END
        raise RuntimeError(
            f"{where} cannot be read: a function of the stream raised StopIteration, "
            "which would be taken for its end. Where it calls `next`, let it catch "
            "that, or give a default."
        ) from None
    except Exception as error:
        raise RuntimeError(
            f"{where} cannot be read: {type(error).__name__}: {error}"
        ) from error


def _cut(
    example: Example, sequences: Sequence[str] | None, begin: int, end: int
) -> tuple[int, Example]:
    """The length of a part of an example, and the part."""
    arrays = as_arrays(example)
    names = sequence_names(arrays, sequences)
    # A copy, for a part must not keep the whole of it in memory.
    part: dict[str, np.ndarray] = {
        name: np.array(value[begin:end] if name in names else value)
        for name, value in arrays.items()
    }
    return common_length(part, names), part


def _checksum(place: int, example: Example) -> int:
    if place % _CHECKED_ONE_IN:
        return 0
    found = 0
    for name in sorted(example):
        array = np.ascontiguousarray(example[name])
        # Of text, or of objects, there are no bytes that stay the same.
        if array.dtype.kind in "biufc":
            found = zlib.crc32(array.data, found)
    return found


def _is_of_function(end: StopIteration) -> bool:
    """Whether a function that an iterator called raised it, and no iterator."""
    frames = [frame for frame, _ in traceback.walk_tb(end.__traceback__)]
    names = [frame.f_globals.get("__name__", "") for frame in frames]
    own = [
        frame.f_code.co_name
        for frame, name in zip(frames, names, strict=True)
        if name != __name__ and name.split(".")[0] not in ("grain", "concurrent")
    ]
    return bool(own) and "__next__" not in own
