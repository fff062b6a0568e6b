"""Iterates over the examples of other people's data loaders, and resumes."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import grain

from jaxbucket.stream.loader_kinds import has_first_state
from jaxbucket.stream.loader_values import checksum_after, decoded, encoded

if TYPE_CHECKING:
    from jaxbucket.stream.loader_stream import LoaderDataset

# The entries of the state of an iterator.
_KEYS = {"elements", "examples", "checksum", "taken", "ended", "loader"}
# Elements that are compared if they are skipped: the first ones, and then a few.
_COMPARED = 64


class LoaderIterator(grain.DatasetIterator[Any]):
    """Iterates over the examples of a loader.

    Its state is the number of elements that the loader has yielded, and the state of
    the loader after them. In the middle of a batch, it is that before the batch, and
    the number of examples taken of it.
    """

    def __init__(self, dataset: LoaderDataset):
        super().__init__()
        self._dataset = dataset
        self._start()

    def _start(self) -> None:
        self._iterator: Any = None
        self._ended = False
        self._pending: Sequence[Any] = []
        self._num_elements = 0
        self._num_examples = 0
        self._checksum = 0
        # The number of examples taken of the last element, and the state before it.
        self._num_taken = 0
        self._before: dict[str, Any] = {}
        self._batch_checksum = 0
        # The state of the loader, until the next element is read.
        self._restored: Any = None

    def __next__(self) -> Any:
        while True:
            while self._num_taken == len(self._pending):
                self._read_element()
            example = self._pending[self._num_taken]
            index = self._num_examples
            # An example that cannot be converted has been read, too.
            self._num_taken += 1
            self._num_examples += 1
            if index % self._dataset.num_parts in self._dataset.parts:
                return self._dataset.example(example)

    def _read_element(self) -> None:
        """Reads the next element of the loader, an example or a batch of them."""
        if self._dataset.batched:
            self._before = self.get_state()
        element, index = self._next_element(), self._num_elements
        self._num_elements += 1
        self._dataset.mark()
        self._pending, self._num_taken = [], 0
        if _is_compared(index):
            self._checksum = checksum_after(self._checksum, element)
        if self._dataset.batched:
            # Before `to_example`, which may change examples in place.
            self._batch_checksum = checksum_after(0, element)
        self._pending = self._dataset.split(element)

    def _next_element(self) -> Any:
        # `StatefulDataLoader` would begin another epoch at its last state.
        if self._ended:
            raise StopIteration
        iterator = self._opened()
        try:
            return next(iterator)
        except StopIteration:
            self._ended = True
            self._dataset.first_state = None
            raise
        except Exception as error:
            if self._restored is None:
                raise
            # Some loaders read the state that they were given at their first element.
            raise rejected(self._dataset.loader, error) from error
        finally:
            if self._restored is not None:
                self._restored = None
                self._dataset.forget_state()

    def _opened(self) -> Iterator[Any]:
        self._dataset.lend(self)
        if self._iterator is None and self._restored is not None:
            self._iterator = self._dataset.open_at(decoded(self._restored))
        elif self._iterator is None:
            self._iterator = self._dataset.open()
        return self._iterator

    def suspend(self) -> None:
        """Saves the state of the loader, which the next call restores."""
        if self._iterator is not None and not self._ended:
            self._restored = self._loader_state()
            if self._restored is not None:
                self._iterator = None
                self._dataset.forget_state()

    def get_state(self) -> dict[str, Any]:
        """Returns the state, which is JSON serializable."""
        if self._num_taken < len(self._pending):
            return {
                **copy.deepcopy(self._before),
                "taken": self._num_taken,
                "batch": self._batch_checksum,
            }
        return {
            "elements": self._num_elements,
            "examples": self._num_examples,
            "checksum": self._checksum,
            "taken": 0,
            "ended": self._ended,
            "loader": self._loader_state(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues at a state that `get_state` has returned.

        Raises:
          ValueError: if the state is not that of such an iterator, or if the loader has
            other examples than it had, or can be iterated over only once.
        """
        if not isinstance(state, Mapping) or not _KEYS <= state.keys():
            raise ValueError(
                f"`state={state!r}` is not the state of a stream from a loader. Pass "
                "what `get_state` returned."
            )
        self._start()
        is_replayed = state["loader"] is None or self._dataset.resume == "replay"
        if state["ended"] and self._dataset.has_state:
            self._ended = True
        elif is_replayed:
            self._skip(state["elements"], state["ended"])
            self._check_same(self._checksum, state["checksum"])
        else:
            self._restored = copy.deepcopy(state["loader"])
            self._opened()
        self._checksum = state["checksum"]
        self._num_elements = state["elements"]
        self._num_examples = state["examples"]
        if state["taken"]:
            self._continue_batch(state["taken"])
            # A loader with a state may augment examples at random.
            if is_replayed:
                self._check_same(self._batch_checksum, state["batch"])

    def _continue_batch(self, num_taken: int) -> None:
        """Reads the batch again of which some examples had been taken."""
        try:
            self._read_element()
        except StopIteration:
            raise _other_length("fewer", self._num_elements + 1) from None
        self._num_taken = num_taken
        self._num_examples += num_taken

    def _skip(self, num_elements: int, is_end: bool) -> None:
        """Reads the elements that were read before, and checks their number."""
        num_skipped = 0
        for element in itertools.islice(self._opened(), num_elements):
            if _is_compared(num_skipped):
                self._checksum = checksum_after(self._checksum, element)
            num_skipped += 1
        self._dataset.mark()
        if num_skipped < num_elements:
            raise _other_length("fewer", num_elements)
        if is_end and next(self._opened(), None) is not None:
            raise _other_length("more", num_elements)
        self._ended = is_end

    def _check_same(self, checksum: int, expected: int) -> None:
        """Raises a ValueError if other elements were read than before."""
        if checksum != expected:
            raise ValueError(
                "`loader` yields other elements than before the state was saved, or "
                "the same ones in another order. It must yield the same elements "
                "again: give it a fixed seed."
            )

    def _loader_state(self) -> Any:
        """Returns the state of the loader for JSON, or None if it has none."""
        if self._restored is not None:
            return copy.deepcopy(self._restored)
        loader: Any = self._dataset.loader
        if self._dataset.resume == "replay":
            return None
        if self._dataset.has_state:
            if self._ended:
                return None
            # A `StatefulDataLoader` draws the order of an epoch at its beginning.
            iterator = self._opened()
            if not (self._num_elements or has_first_state(loader, iterator)):
                return None
            state = self._dataset.state()
        elif self._num_elements and hasattr(self._iterator, "set_state"):
            state = self._iterator.get_state()
        else:
            return None
        try:
            return encoded(state)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"The state of `loader`, a {type(loader).__name__}, is not JSON "
                f"serializable: {error}. Pass `resume='replay'`, if it yields the same "
                "examples again."
            ) from None


def _is_compared(index: int) -> bool:
    return index < _COMPARED or index % _COMPARED == 0


def _other_length(change: str, num_elements: int) -> ValueError:
    return ValueError(
        f"`loader` has {change} than {num_elements} elements, which it had yielded "
        "before. It must yield the same elements again."
    )


def rejected(loader: Any, error: Exception) -> ValueError:
    """Returns the error for a loader that does not accept a state."""
    return ValueError(
        f"`loader`, a {type(loader).__name__}, cannot continue at the state: "
        f"{type(error).__name__}: {error}. Pass the loader that the state was saved "
        "from, or `resume='replay'`."
    )
