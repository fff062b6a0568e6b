"""The state of an iterator of `easy_first` that checkpoints hold, and its checks."""

from __future__ import annotations

import itertools
import operator
import reprlib
from collections.abc import Mapping
from typing import Any, NamedTuple

_REMEDY = "Pass a state as `get_state()` returned it."


class PendingState(NamedTuple):
    """The state of an iterator of `easy_first`.

    The names of the attributes are the keys of the state in checkpoints.

    Attributes:
      stream: the state of the stream before the first example to read again.
      first: index of this example.
      first_checksum: checksum of the examples before it.
      read: the number of examples read.
      yielded: the number of examples yielded.
      pending: indices of the pending examples, ascending.
      checksum: checksum of all examples read.
    """

    stream: Any
    first: int
    first_checksum: int
    read: int
    yielded: int
    pending: list[int]
    checksum: int

    @classmethod
    def from_dict(cls, state: Any) -> PendingState:
        """Parses the result of `_asdict`.

        Raises:
          ValueError: if `state` is not valid.
        """
        if not isinstance(state, Mapping) or not state.keys() >= set(cls._fields):
            raise ValueError(
                "`state` is not a state of `easy_first`. Pass the result of "
                "`get_state()` of its iterator."
            )
        pending = state["pending"]
        if not isinstance(pending, list | tuple):
            raise ValueError(
                f"`state` has `pending={pending!r}`, which is not a list. {_REMEDY}"
            )
        names = set(cls._fields) - {"stream", "pending"}
        parsed = cls(
            stream=state["stream"],
            pending=[_count(f"pending[{i}]", x) for i, x in enumerate(pending)],
            **{name: _count(name, state[name]) for name in names},
        )
        parsed._check_consistent()
        return parsed

    def _check_consistent(self) -> None:
        first, read, pending = self.first, self.read, self.pending
        bounds = [first - 1, *pending, read]
        if any(index <= before for before, index in itertools.pairwise(bounds)):
            raise ValueError(
                f"`state` has `pending={reprlib.repr(pending)}`, but these indices "
                f"must increase from at least `first={first}` to less than "
                f"`read={read}`. {_REMEDY}"
            )
        if read != self.yielded + len(pending):
            raise ValueError(
                f"`state` has `read={read}`, but `yielded={self.yielded}` examples and "
                f"{len(pending)} in `pending` make {self.yielded + len(pending)}. "
                f"{_REMEDY}"
            )

    def check_read(self, checksum: int) -> None:
        """Raises a ValueError if other examples were read again."""
        if checksum != self.checksum:
            raise ValueError(
                f"The stream of `easy_first` has changed: examples {self.first} to "
                f"{self.read - 1} differ from those that had been read when the state "
                "was saved. Pass the same stream, and seed all random draws."
            )


def _count(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if number < 0 or isinstance(value, bool):
        raise ValueError(
            f"`state` has `{name}={value!r}`, which is not a count. {_REMEDY}"
        )
    return number
