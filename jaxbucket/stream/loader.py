"""Other people's data loaders as a `grain.IterDataset` of examples."""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeAlias

import grain
import numpy as np

from jaxbucket.base.checks import check_function
from jaxbucket.base.notes import Noting
from jaxbucket.base.row_shard import RowShard, checked_shard
from jaxbucket.data.example import Example

ToExample: TypeAlias = Callable[[Any], Example | Iterable[Example]]
# The number of elements between two saved states of a loader, and the number of
# elements that are compared when they are read again.
_SAVED_EVERY, _COMPARED = 32, 8


class Resumable(Protocol):
    """Saves and restores where a loader is."""

    def state_dict(self) -> Any:
        """Returns where the loader is, as plain Python for JSON."""
        ...

    def load_state_dict(self, state: Any, /) -> None:
        """Lets the next `iter(loader)` continue at a state."""
        ...


def from_loader(
    loader: Iterable[Any],
    to_example: ToExample,
    *,
    shard: RowShard | None = None,
    resume: Resumable | None = None,
) -> LoaderDataset:
    """Returns a `grain.IterDataset` of the examples of another data loader.

    Every iteration over the dataset begins at `iter(loader)`. With `resume`, the loader
    is first moved back to where it was when this function was called, so all epochs
    have the same order: to shuffle, pass a function of (epoch, seed) to
    `stream_batches` that calls `from_loader` for each epoch.

    A resumed iterator restores the last state that `resume` has returned, or begins
    again without it, and skips the elements that had been read since. The last of these
    are compared, so a loader with another order is refused.

    Example:
      >>> import jaxbucket as jb
      >>> pairs = [([7, 3, 5], 0), ([2], 1), ([1, 1], 0)]
      >>> def to_example(pair):
      ...     return {"tokens": pair[0], "label": pair[1]}
      >>> [example["tokens"] for example in from_loader(pairs, to_example)]
      [[7, 3, 5], [2], [1, 1]]
      >>> shard = jb.data.RowShard((1,), num_parts=2)  # `local_rows(mesh)`
      >>> [x["tokens"] for x in from_loader(pairs, to_example, shard=shard)]
      [[2]]

    Args:
      loader: yields elements, such as examples or batches.
      to_example: converts an element to an example, a dict of arrays, or an element
        that is a batch to a list of examples. `dict` if elements are examples, `list`
        if they are lists of examples.
      shard: `local_rows(mesh)`, to give every group of processes with different rows
        its own part of the elements, taken in turn. By default this process gets all
        elements, as it should if the loader has been sharded already.
      resume: saves and restores where the loader is, by `state_dict()` and
        `load_state_dict(state)`: the loader itself if it has these methods.

    Returns:
      The dataset, for `stream_batches` and `sample_lengths`.

    Raises:
      ValueError: if `to_example` is not callable, or `loader` is not iterable. From an
        iterator: if it returns something else, an iterator such as a generator is read
        a second time, or a resumed loader has other elements than before.
    """
    check_function("to_example", to_example, "an element of the loader")
    if not any(hasattr(type(loader), x) for x in ("__iter__", "__getitem__")):
        raise ValueError(
            f"`loader` is {loader}, which is not iterable. Pass what it returns, in a "
            "function of (epoch, seed) if that can be read only once."
        )
    return LoaderDataset(loader, to_example, checked_shard(shard), resume)


class LoaderDataset(grain.IterDataset[Example]):
    """The examples of another data loader, created by `from_loader`."""

    def __init__(
        self,
        loader: Iterable[Any],
        to_example: ToExample,
        shard: RowShard,
        resume: Resumable | None,
    ):
        super().__init__()
        self._loader = loader
        self._to_example = to_example
        self._resume = resume
        self._is_read = False
        self.shard, self.resumes = shard, resume is not None
        self._beginning = self.loader_state()
        # Stands for the iterator that has moved the loader, which has only one state.
        # (PyTorch waits for its workers if a cycle of objects owns them.)
        self.reader: object = None

    def __iter__(self) -> LoaderIterator:
        return LoaderIterator(self)

    def loader_state(self) -> str | None:
        """Returns where the loader is, as JSON; None without `resume`."""
        return None if self._resume is None else json.dumps(self._resume.state_dict())

    def open(self, state: str | None, reader: object) -> Iterator[Any]:
        """Returns an iterator over the loader.

        Args:
          state: where it starts; None for the beginning of the loader.
          reader: stands for the iterator that reads it.
        """
        if state is not None or self._is_read:
            self.move(state)
        self.reader = reader
        iterator = iter(self._loader)
        if iterator is self._loader and self._is_read:
            raise ValueError(
                f"`loader` is of type {type(self._loader).__name__}, which can be read "
                "only once. Pass an object that returns a new iterator each time."
            )
        self._is_read = True
        return iterator

    def move(self, state: str | None = None) -> None:
        """Moves the loader to a state, by default to its beginning, with `resume`."""
        state = state or self._beginning
        if self._resume is not None and state is not None:
            self._resume.load_state_dict(json.loads(state))

    def examples(self, element: Any) -> list[Example]:
        """Returns the examples of an element.

        Raises:
          ValueError: if `to_example` returns something else.
        """
        with Noting("This is of `to_example`: `dict` for dicts, `list` for lists."):
            converted: Any = self._to_example(element)
            is_one = isinstance(converted, Mapping)
            examples: list[Any] = [converted] if is_one else list(converted)
            if not all(isinstance(example, Mapping) for example in examples):
                raise ValueError(
                    f"{converted!r} is not a dict of arrays. Return one, or a list of "
                    "such dicts if the element is a batch."
                )
        return examples


class LoaderIterator(grain.DatasetIterator[Example]):
    """Iterates over the examples of a loader.

    Its state is a state of the loader, and the number of elements to read from there.
    """

    def __init__(self, dataset: LoaderDataset):
        super().__init__()
        self._dataset = dataset
        self._token = object()
        self._start(None, 0)

    def _start(self, loader_state: str | None, first: int) -> None:
        self._iterator: Iterator[Any] | None = None  # Opened for the first element.
        self._loader_state = loader_state
        # The index of the first element after this state, and the number read since.
        self._first, self._num_read = first, 0
        # The examples of the last element, and the number of them that are taken.
        self._examples: list[Example] = []
        self._num_taken = 0
        self._checksums: collections.deque[int] = collections.deque(maxlen=_COMPARED)

    def __next__(self) -> Example:
        self._assert_not_closed()
        is_open, dataset = self._iterator is not None, self._dataset
        if is_open and dataset.resumes and dataset.reader is not self._token:
            # Another iterator has moved the loader since this one was opened.
            self.set_state(self.get_state())
        while self._num_taken == len(self._examples):
            self._save_loader_state()
            self._read_element()
        self._num_taken += 1
        return self._examples[self._num_taken - 1]

    def _save_loader_state(self) -> None:
        # Before the first element, some loaders have the state of the last epoch.
        every = _SAVED_EVERY if self._loader_state else 1
        state = self._dataset.loader_state() if self._num_read >= every else None
        if state is not None:
            self._loader_state = state
            self._first, self._num_read = self._first + self._num_read, 0
            self._examples, self._num_taken = [], 0
            self._checksums.clear()

    def _read_element(self, convert: bool = True) -> None:
        """Reads the next element, and converts it if it belongs to this process."""
        if self._iterator is None:
            self._iterator = self._dataset.open(self._loader_state, self._token)
        element, index = next(self._iterator), self._first + self._num_read
        self._num_read += 1
        self._examples, self._num_taken = [], 0
        shard = self._dataset.shard
        if convert and index % shard.num_parts in shard.parts:
            self._examples = self._dataset.examples(element)
            self._checksums.append(functools.reduce(add_checksum, self._examples, 0))

    def get_state(self) -> dict[str, Any]:
        """Returns the state, as plain Python for JSON."""
        return {
            "loader": self._loader_state,
            "first": self._first,
            "read": self._num_read,
            "taken": self._num_taken,
            "checksum": zlib.crc32(str(list(self._checksums)).encode()),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues at a state that `get_state` has returned.

        Raises:
          ValueError: if the loader has other elements than it had, or can be iterated
            over only once.
        """
        self._start(state["loader"], state["first"])
        not_compared = state["read"] - _COMPARED * self._dataset.shard.num_parts
        with contextlib.suppress(StopIteration):
            for number in range(state["read"]):
                self._read_element(convert=number >= not_compared)
        self._num_taken = state["taken"]
        if self.get_state() != state:
            raise ValueError(
                "`loader` yields other elements than before the state was saved, or in "
                "another order. Give it a fixed seed."
            )

    def close(self) -> None:
        """Moves the loader back to its beginning, if this iterator has moved it."""
        is_moved = not self._closed and self._dataset.reader is self._token
        # Grain also closes iterators when Python exits, where modules become None.
        if is_moved and sys is not None and not sys.is_finalizing():
            self._dataset.move()
        super().close()


def add_checksum(checksum: int, example: Example) -> int:
    """Returns the checksum of the examples before, and of the numbers of this one."""
    for name in sorted(example):
        array = np.ascontiguousarray(example[name])
        checksum = zlib.crc32(f"{name} {array.shape}".encode(), checksum)
        # The bytes of strings and objects may differ between runs. "V" is bfloat16.
        if array.dtype.kind in "biufcV" and not array.dtype.hasobject:
            checksum = zlib.crc32(array.view(np.uint8).data, checksum)
    return checksum
