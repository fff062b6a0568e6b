"""A curriculum for a stream: hard examples wait until they are open."""

from __future__ import annotations

import copy
import heapq
import math
import reprlib
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import grain

from jaxbucket.base.checks import check_function, check_positive
from jaxbucket.stream.loader_values import checksum_after
from jaxbucket.stream.pending_state import PendingState
from jaxbucket.stream.reader import END, next_of
from jaxbucket.stream.state import check_not_rejected

# The number of examples between two saved states of the stream.
_SNAPSHOT_EVERY = 64


def easy_first(
    stream: grain.IterDataset[Any],
    difficulty_fn: Callable[[Any], float],
    limit: Callable[[int], float],
    *,
    max_pending: int = 10_000,
) -> EasyFirst:
    """Returns a stream that yields an example once it is easy enough.

    An example is open if its difficulty is at most the limit. Examples that are too
    difficult wait, and come as soon as they are open, the easiest first, before newer
    ones. When `max_pending` examples wait, or the stream has ended, the easiest of them
    comes although it is not open. So every example comes exactly once.

    Pass the result to `stream_batches`. Each process orders its own part of the
    examples, as does each worker. The limit depends on the number of examples that this
    iterator has yielded, so it starts again with every epoch of
    `stream_batches(num_epochs=...)`.

    Example:
      >>> stream = grain.MapDataset.source([5, 1, 4, 2, 3]).to_iter_dataset()
      >>> list(easy_first(stream, lambda x: x, limit=lambda count: 1 + count))
      [1, 2, 3, 4, 5]

      A limit that rises from 64 to 512 over the first 100,000 examples:

      >>> from jaxbucket.schedule import ByValue, LinearPacing
      >>> limit = ByValue(LinearPacing(start=0, steps=100_000), low=64, high=512)
      >>> round(limit(0)), round(limit(50_000))
      (64, 288)

    Args:
      stream: the examples.
      difficulty_fn: returns the difficulty of an example, a finite number.
      limit: returns the largest difficulty that is open after a number of examples.
        They are the steps of a pacing function: `LinearPacing(steps=100_000)`.
      max_pending: the largest number of pending examples, which are kept in memory. To
        resume, the stream is read again from the oldest of them.

    Returns:
      The stream, whose iterators save and restore their state if those of `stream` do.

    Raises:
      ValueError: if `stream` is not a `grain.IterDataset`, a function is not callable,
        `limit` is a pacing function over epochs or tokens, or `max_pending` is not
        positive. From an iterator: if a difficulty or a limit is not a number, a state
        is not valid, or the stream has changed since it was saved.
      RuntimeError: from an iterator, if an example cannot be read, or a function raises
        StopIteration.
    """
    if not isinstance(stream, grain.IterDataset):
        raise ValueError(
            f"`stream` is a {type(stream).__name__}, not a `grain.IterDataset`. "
            "Convert it, for example with `jb.stream.from_loader`."
        )
    check_function("difficulty_fn", difficulty_fn, "an example")
    check_function("limit", limit, "the number of examples so far")
    unit = getattr(limit, "unit", "steps")
    if unit != "steps":
        raise ValueError(
            f"`limit` is a pacing function over {unit}, but is called with the number "
            "of examples. Pass one with `steps=`, which counts examples here, or any "
            "function of this number."
        )
    check_positive("max_pending", max_pending)
    return EasyFirst(stream, difficulty_fn, limit, max_pending)


class EasyFirst(grain.IterDataset[Any]):
    """The stream that `easy_first` returns."""

    def __init__(
        self,
        stream: grain.IterDataset[Any],
        difficulty_fn: Callable[[Any], float],
        limit: Callable[[int], float],
        max_pending: int,
    ):
        super().__init__(stream)
        self.difficulty_fn = difficulty_fn
        self.limit = limit
        self.max_pending = max_pending

    @property
    def stream(self) -> grain.IterDataset[Any]:
        """The examples. A worker replaces them by its share."""
        return cast(grain.IterDataset[Any], self.parents[0])

    def __iter__(self) -> EasyFirstIterator:
        return EasyFirstIterator(self)


class _Pending(NamedTuple):
    """A pending example, with its number in the stream. The easiest one comes first."""

    difficulty: float
    number: int
    example: Any


class _Snapshot(NamedTuple):
    """A point from which the stream can be read again.

    Attributes:
      number: the number of the next example in the stream.
      checksum: checksum of all examples before it.
      state: the state of the stream's iterator.
    """

    number: int
    checksum: int
    state: Any


class EasyFirstIterator(grain.DatasetIterator[Any]):
    """Yields the examples of `easy_first`.

    Its state is a state of the stream before the oldest pending example, and the
    indices of all pending ones.
    """

    def __init__(self, dataset: EasyFirst):
        super().__init__()
        self._dataset = dataset
        self._iterator = iter(dataset.stream)
        # False from a rejected state until a valid one is set.
        self._is_valid = True
        self._start()

    def _start(self) -> None:
        self._num_read = 0
        self._num_yielded = 0
        # The checksum of all examples read, which detects a stream that has changed.
        self._checksum = 0
        # Remains True if an example could not be read.
        self._is_reading = False
        self._ended = False
        # A heap. The numbers of its examples are all different.
        self._pending: list[_Pending] = []
        self._snapshots: list[_Snapshot] = []

    def __next__(self) -> Any:
        check_not_rejected(self._is_valid)
        if self._is_reading:
            # The iterator of the stream is past this example, which would be lost.
            raise RuntimeError(
                f"The last call failed at example {self._num_read} of the stream of "
                "`easy_first`. To read it again, call `set_state(get_state())`."
            )
        count = self._num_yielded
        example = self._next_open(self._number("limit", count, f"{count} examples"))
        self._num_yielded += 1
        return example

    def _next_open(self, limit: float) -> Any:
        """Returns the next open example, or the easiest one if there is none."""
        pending = self._pending
        while pending or not self._ended:
            is_over = self._ended or len(pending) >= self._dataset.max_pending
            if pending and (is_over or pending[0].difficulty <= limit):
                return heapq.heappop(pending).example
            new = self._read()
            if new and new.difficulty <= limit:
                return new.example
            if new:
                heapq.heappush(pending, new)
        raise StopIteration

    def _read(self) -> _Pending | None:
        """Reads an example and measures it; returns None after the last one."""
        index = self._num_read
        if index % _SNAPSHOT_EVERY == 0:
            self._take_snapshot()
            self._drop_unused_snapshots()
        self._is_reading = True
        example = next_of(
            self._iterator, f"Example {index} of the stream of `easy_first`"
        )
        if example is END:
            self._ended, self._is_reading = True, False
            return None
        # Before `difficulty_fn`, which may change the example in place.
        checksum = checksum_after(self._checksum, example)
        difficulty = self._number("difficulty_fn", example, f"example {index}")
        self._num_read, self._checksum = index + 1, checksum
        self._is_reading = False
        return _Pending(difficulty, index, example)

    def _number(self, name: str, argument: Any, origin: str) -> float:
        """Returns the result of a function of the dataset, as a float."""
        try:
            value = getattr(self._dataset, name)(argument)
        except StopIteration as error:
            raise RuntimeError(
                f"`{name}` raised StopIteration for {origin}, which would look like "
                "the end of the stream. Catch it in the function, or pass a default "
                "to `next`."
            ) from error
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        # An infinite limit opens all examples.
        if math.isnan(number) or (name != "limit" and math.isinf(number)):
            raise ValueError(
                f"`{name}` returns {value!r} for {origin}. Return a finite number."
            )
        return number

    def get_state(self) -> dict[str, Any]:
        """Returns the state, as plain Python if that of the stream is.

        After an error, it is the state before the example that could not be read.

        Raises:
          ValueError: if the state that was set last was rejected.
        """
        check_not_rejected(self._is_valid)
        self._drop_unused_snapshots()
        if not self._snapshots:
            self._take_snapshot()
        snapshot = self._snapshots[0]
        return PendingState(
            stream=copy.deepcopy(snapshot.state),
            first=snapshot.number,
            first_checksum=snapshot.checksum,
            read=self._num_read,
            yielded=self._num_yielded,
            pending=sorted(x.number for x in self._pending),
            checksum=self._checksum,
        )._asdict()

    def _take_snapshot(self) -> None:
        state = copy.deepcopy(self._iterator.get_state())
        self._snapshots.append(_Snapshot(self._num_read, self._checksum, state))

    def _drop_unused_snapshots(self) -> None:
        """Keeps the last one before each pending example, and the latest of all."""
        used = {x.number // _SNAPSHOT_EVERY for x in self._pending}
        earlier, latest = self._snapshots[:-1], self._snapshots[-1:]
        earlier = [x for x in earlier if x.number // _SNAPSHOT_EVERY in used]
        self._snapshots = earlier + latest

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues from a state, and reads its pending examples again.

        Args:
          state: a state that `get_state` returned, for the same stream. A limit or a
            difficulty function that has changed affects only the order from here on.

        Raises:
          ValueError: if `state` is not such a state, which leaves the iterator as it
            was; or if the stream rejects its state, or has changed since it was saved.
            Then the iterator needs another state to continue.
          RuntimeError: if the stream cannot be read; likewise.
        """
        saved = PendingState.from_dict(state)
        self._is_valid = False
        self._start()
        self._restore_stream(saved)
        pending = set(saved.pending)
        while self._num_read < saved.read:
            example = self._read()
            if example is None:
                raise ValueError(
                    f"`stream` has fewer examples than the {saved.read} that had been "
                    "read when the state was saved. Pass the same stream."
                )
            if example.number in pending:
                heapq.heappush(self._pending, example)
        saved.check_read(self._checksum)
        self._num_yielded = saved.yielded
        self._is_valid = True

    def _restore_stream(self, saved: PendingState) -> None:
        """Moves the iterator of the stream to the first example to read again."""
        try:
            self._iterator.set_state(copy.deepcopy(saved.stream))
        except Exception as error:
            raise ValueError(
                "The stream of `easy_first` rejects its own state, "
                f"`stream={reprlib.repr(saved.stream)}`: {type(error).__name__}: "
                f"{str(error).rstrip('.')}. Pass the stream that the state was saved "
                "from, or restore an earlier checkpoint."
            ) from error
        self._num_read, self._checksum = saved.first, saved.first_checksum
        snapshot = _Snapshot(
            saved.first, saved.first_checksum, copy.deepcopy(saved.stream)
        )
        self._snapshots.append(snapshot)

    def close(self) -> None:
        self._iterator.close()
