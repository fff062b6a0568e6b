"""A curriculum for a stream: hard examples wait until they are open."""

from __future__ import annotations

import collections
import copy
import heapq
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import grain

from jaxbucket.base.checks import check_positive

# The number of examples between two saved states of the stream.
_SNAPSHOT_EVERY = 64
_STATE_KEYS = {"stream", "first", "read", "yielded", "pending"}


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
        positive. From an iterator: if a difficulty or a limit is not a number, or it
        cannot continue from a state.
    """
    if not isinstance(stream, grain.IterDataset):
        raise ValueError(
            f"`stream` is a {type(stream).__name__}, not a `grain.IterDataset`. "
            "Convert it, for example with `jb.stream.from_loader`."
        )
    for name, function in (("difficulty_fn", difficulty_fn), ("limit", limit)):
        if not callable(function):
            raise ValueError(f"`{name}={function!r}` is not a function.")
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


class EasyFirstIterator(grain.DatasetIterator[Any]):
    """Yields the examples of `easy_first`.

    Its state is a state of the stream before the oldest pending example, and the
    indices of all pending ones.
    """

    def __init__(self, dataset: EasyFirst):
        super().__init__()
        self._dataset = dataset
        self._iterator = iter(dataset.stream)
        self._start()

    def _start(self) -> None:
        self._num_read = 0
        self._num_yielded = 0
        self._ended = False
        # A heap. The numbers of its examples are all different.
        self._pending: list[_Pending] = []
        # Pairs of an index, and the state of the stream before this example.
        self._snapshots: collections.deque[tuple[int, Any]] = collections.deque()

    def __next__(self) -> Any:
        limit = self._number("limit", self._dataset.limit(self._num_yielded))
        example = self._next_open(limit)
        self._num_yielded += 1
        return example

    def _next_open(self, limit: float) -> Any:
        """Returns the next open example, or the easiest one if there is none."""
        pending = self._pending
        while True:
            is_full = len(pending) >= self._dataset.max_pending
            is_over = is_full or self._ended
            if pending and (pending[0].difficulty <= limit or is_over):
                return heapq.heappop(pending).example
            try:
                new = self._read()
            except StopIteration:
                self._ended = True
                if not pending:
                    raise
                return heapq.heappop(pending).example
            if new.difficulty <= limit:
                return new.example
            heapq.heappush(pending, new)

    def _read(self) -> _Pending:
        index = self._num_read
        if index % _SNAPSHOT_EVERY == 0:
            self._snapshots.append((index, copy.deepcopy(self._iterator.get_state())))
            self._drop_old_snapshots()
        example = next(self._iterator)
        self._num_read += 1
        difficulty = self._dataset.difficulty_fn(example)
        return _Pending(self._number("difficulty_fn", difficulty), index, example)

    def _number(self, name: str, value: Any) -> float:
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        # An infinite limit opens all examples.
        if math.isnan(number) or (name != "limit" and math.isinf(number)):
            count = self._num_yielded if name == "limit" else self._num_read - 1
            what = f"{count} examples" if name == "limit" else f"example {count}"
            raise ValueError(
                f"`{name}` returns {value!r} for {what}. Return a finite number."
            )
        return number

    def get_state(self) -> dict[str, Any]:
        self._drop_old_snapshots()
        if not self._snapshots:
            self._snapshots.append((0, copy.deepcopy(self._iterator.get_state())))
        first, state = self._snapshots[0]
        return {
            "stream": copy.deepcopy(state),
            "first": first,
            "read": self._num_read,
            "yielded": self._num_yielded,
            "pending": sorted(x.number for x in self._pending),
        }

    def _drop_old_snapshots(self) -> None:
        """Keeps the last one before the oldest pending example, and later ones."""
        oldest = min((x.number for x in self._pending), default=self._num_read)
        while len(self._snapshots) > 1 and self._snapshots[1][0] <= oldest:
            self._snapshots.popleft()

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues from a state.

        Raises:
          ValueError: if `state` is not one of `get_state`, or the stream has fewer
            examples than when it was saved.
        """
        if not isinstance(state, Mapping) or not state.keys() >= _STATE_KEYS:
            raise ValueError(
                "`state` is not a state of `easy_first`. Pass the result of "
                "`get_state()` of its iterator."
            )
        self._start()
        self._iterator.set_state(copy.deepcopy(state["stream"]))
        self._num_read = state["first"]
        self._snapshots.append((state["first"], copy.deepcopy(state["stream"])))
        pending = set(state["pending"])
        while self._num_read < state["read"]:
            example = self._read_again(state["read"])
            if example.number in pending:
                heapq.heappush(self._pending, example)
        self._num_yielded = state["yielded"]

    def _read_again(self, num_read: int) -> _Pending:
        """Returns an example that had been read before the state was saved."""
        try:
            return self._read()
        except StopIteration:
            raise ValueError(
                f"`stream` has fewer examples than the {num_read} that had been read "
                "when the state was saved. Pass the same stream."
            ) from None

    def close(self) -> None:
        self._iterator.close()
