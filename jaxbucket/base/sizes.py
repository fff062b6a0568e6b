"""Values for each of several sequences, such as T of the source and of the target.

`Sizes` have a number for each sequence, lengths one for each example and sequence.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.checks import check_lengths, check_positive
from jaxbucket.base.length_counts import LengthCounts

Value = TypeVar("Value")
# One length per example, or one per example for each sequence by name.
Lengths: TypeAlias = ArrayLike | Mapping[str, ArrayLike]
# The same, or the number of examples of each length.
Counted: TypeAlias = LengthCounts | Lengths


class PerSequence(Mapping[str, Value]):
    """An immutable mapping from the name of a sequence to a value, sorted by name.

    Args:
      values: sequence name -> value.
      argument: the name of the argument, for messages.
    """

    def __init__(self, values: Mapping[str, Value], argument: str):
        check_sequence_names(argument, values)
        self._values = {name: values[name] for name in sorted(values)}

    def __getitem__(self, name: str) -> Value:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(tuple(self._values.items()))

    def __repr__(self) -> str:
        return repr(self._values)

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.items())


@functools.total_ordering
class Sizes(PerSequence[int]):
    """A positive integer for each of several sequences.

    Sizes are ordered by their total first, so sizes that hold others come later.

    Example:
      >>> sizes = Sizes({"target": 4, "source": 8})
      >>> sizes, sizes.total
      ({'source': 8, 'target': 4}, 12)
      >>> sizes.holds({"source": 8, "target": 3})
      True

    Args:
      sizes: sequence name -> a positive integer.
      argument: the name of the argument, for messages.
    """

    def __init__(self, sizes: Mapping[str, Any], argument: str = "seq_len"):
        super().__init__(sizes, argument)
        for name, size in self._values.items():
            self._values[name] = check_positive(f"{argument}[{name!r}]", size)

    @property
    def total(self) -> int:
        """The sum of all sizes."""
        return sum(self.values())

    def holds(self, others: Mapping[str, int]) -> bool:
        """Returns whether each size is at least that of the same sequence in others."""
        return self.keys() == others.keys() and all(
            size >= others[name] for name, size in self.items()
        )

    def __lt__(self, other: Any) -> bool:
        if not isinstance(other, Sizes):
            return NotImplemented
        return (self.total, *self.items()) < (other.total, *other.items())


if TYPE_CHECKING:
    # Code is written for one sequence or for several, and a type checker cannot know
    # for which: both `8 * size` and `8 * size["source"]` are correct.
    class Size(int, Mapping[str, int]): ...
else:
    Size = int | Sizes


def check_sequence_names(argument: str, values: Mapping[Any, Any]) -> None:
    """Raises a ValueError if there are fewer than two names, or one is not a string."""
    if len(values) < 2 or not all(isinstance(name, str) for name in values):
        raise ValueError(
            f"`{argument}` is a mapping with the sequences {list(values)}. Pass at "
            "least two names of features, for one sequence the value itself, or counts "
            "of lengths as `jb.LengthCounts`."
        )


def check_same_sequences(
    argument: str, values: Collection[Any], sequences: Collection[str], others: str
) -> None:
    """Raises a ValueError if names are not those of the expected sequences.

    Args:
      argument: the name of the argument, for messages.
      values: the names that were given, or a mapping from them.
      sequences: the names of the expected sequences.
      others: what has these sequences, and a verb, such as "the plan has".
    """
    if set(values) == set(sequences):
        return
    raise ValueError(
        f"`{argument}` has the sequences {list(values)}, but {others} "
        f"{list(sequences)}. Use the same sequences."
    )


def total(size: int | Sizes) -> int:
    """Returns a size, or the sum of the sizes of several sequences."""
    return size.total if isinstance(size, Sizes) else size


def each_size(size: int | Mapping[str, int]) -> tuple[int, ...]:
    """Returns the size of each of several sequences, or of the only one."""
    return tuple(size.values()) if isinstance(size, Mapping) else (size,)


def checked_size(name: str, value: Any) -> int | Sizes:
    """Returns a positive integer, or `Sizes` if `value` is a mapping."""
    if isinstance(value, Sizes):
        return value
    if isinstance(value, Mapping):
        return Sizes(value, name)
    return check_positive(name, value)


def sizes_of(
    name: str, value: Any, sequences: Collection[str], others: str
) -> int | Sizes:
    """Returns `checked_size`, after `check_same_sequences` of a mapping."""
    if isinstance(value, Mapping):
        check_same_sequences(name, value, sequences, others)
    return checked_size(name, value)


def lengths_matrix(lengths: Any, sequences: Sequence[str]) -> np.ndarray:
    """Returns the lengths of several sequences as one array, `[N, Q]`.

    Example:
      >>> lengths_matrix({"target": [1, 2], "source": [3, 5]}, ["source", "target"])
      array([[3, 1],
             [5, 2]])

    Args:
      lengths: sequence name -> `[N]` integers; or `[N, Q]` integers, with a column for
        each sequence in the order of `sequences`. An example that lacks a sequence has
        length 0 there.
      sequences: the names of the Q sequences, sorted.
    """
    if isinstance(lengths, np.ndarray) and lengths.shape[1:] == (len(sequences),):
        lengths = dict(zip(sequences, lengths.T, strict=True))
    if not isinstance(lengths, Mapping):
        raise ValueError(
            f"`lengths` is a {type(lengths).__name__}. Pass a mapping from each of "
            f"{list(sequences)} to its lengths [N]."
        )
    check_sequence_names("lengths", lengths)
    check_same_sequences("lengths", lengths, sequences, "the plan has")
    columns = [check_lengths(lengths[x], f"lengths[{x!r}]", 0) for x in sequences]
    if len({len(column) for column in columns}) > 1:
        raise ValueError(
            f"`lengths` has the numbers of examples {[len(x) for x in columns]} for "
            f"{list(sequences)}. Pass one length per example for every sequence."
        )
    matrix = np.stack(columns, axis=1)
    if (is_empty := ~matrix.any(axis=1)).any():
        raise ValueError(
            f"`lengths` of example {int(np.argmax(is_empty))} are 0 in all of "
            f"{list(sequences)}. Remove the example or measure it again."
        )
    return matrix


def any_lengths(lengths: Any, sequences: Sequence[str]) -> np.ndarray:
    """Returns lengths of one sequence, `[N]`; or of several, as `lengths_matrix`."""
    if sequences:
        return lengths_matrix(lengths, sequences)
    return check_lengths(lengths)


def total_lengths(lengths: np.ndarray) -> np.ndarray:
    """Returns the tokens of each example, `[N]`, from `[N]` or `[N, Q]` lengths.

    Example:
      >>> total_lengths(np.array([[3, 1], [5, 2]]))
      array([4, 7])
    """
    if lengths.ndim == 1:
        return lengths
    return check_lengths(lengths.sum(axis=1, dtype=np.int64))


def row_keys(rows: np.ndarray, most: Sequence[int]) -> np.ndarray:
    """Returns `[N]` integers that compare like `[N, Q]` rows, at most `most` each."""
    if math.prod(size + 1 for size in most) < 2**63:
        keys = np.zeros(len(rows), np.int64)
        for column, size in enumerate(most):
            keys = keys * (size + 1) + rows[:, column]
        return keys
    return np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)
