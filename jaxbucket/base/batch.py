"""The rows of a batch and their arrays.

Three kinds of index are used throughout:

* an *example* is one record of the source, identified by its index in `lengths`;
* a *row* is one line of a batch, which holds an example or is empty (`-1`);
* a *step* is one optimizer update, with one batch or with several micro-batches.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxbucket.base.bucket import Bucket
from jaxbucket.base.checks import (
    check_choice,
    check_integer,
    check_positive,
    check_type,
)
from jaxbucket.base.sizes import Sizes

EMPTY_ROW = -1


@dataclasses.dataclass(frozen=True, eq=False)
class BatchIndices:
    """The bucket of a batch, and the examples in its rows.

    Attributes:
      bucket: the global shape (B, T).
      rows: `[B]` int64, the example in each row; -1 marks an empty row. For packed rows
        `[B, max_segments]` int64, the examples in each row, followed by -1.
    """

    bucket: Bucket
    rows: np.ndarray

    @property
    def num_examples(self) -> int:
        """The number of examples in the batch."""
        return int(np.count_nonzero(self.rows != EMPTY_ROW))


@dataclasses.dataclass(frozen=True)
class RowShard:
    """The rows of every global batch that this process must load.

    A mesh shards the B rows into `num_parts` equal, contiguous parts, and the devices
    of this process hold the given `parts`. Two processes may need the same part, for
    example if a model axis spans hosts. The parts of a process need not be adjacent.
    If devices may share rows, adjacent parts are joined for buckets with few rows.

    Example:
      >>> RowShard(parts=(0, 3), num_parts=4).rows(8)
      array([0, 1, 6, 7])
      >>> RowShard((0, 3), num_parts=4, cuts=(1, 2, 4)).of(Bucket(2, 8)).num_parts
      2

    Attributes:
      parts: the indices of the parts to load, ascending.
      num_parts: the number of parts of a batch.
      axes: the mesh axes that shard the batch, for error messages.
      cuts: the numbers of devices that may share a row, ascending.

    Raises:
      ValueError: if `parts` are not ascending integers in `[0, num_parts)`.
    """

    parts: tuple[int, ...] = (0,)
    num_parts: int = 1
    axes: tuple[str, ...] = ()
    cuts: tuple[int, ...] = (1,)

    def __post_init__(self):
        number = check_positive("num_parts", self.num_parts)
        parts = [check_integer("parts", part, most=number - 1) for part in self.parts]
        object.__setattr__(self, "num_parts", number)
        object.__setattr__(self, "parts", tuple(parts))
        if not parts or parts != sorted({*parts}) or parts[0] < 0:
            raise ValueError(f"`parts={parts}`: pass indices that increase from 0 on.")

    def can_cut(self, bucket: Bucket) -> int | None:
        """Returns how many devices share a row; None if B and T allow no number."""
        for cut in self.cuts:
            is_whole = bucket.batch_size % (self.num_parts // cut) == 0
            if is_whole and not any(seq_len % cut for seq_len in bucket.seq_lens):
                return cut
        return None

    def cut(self, bucket: Bucket) -> int:
        """Returns the number of devices that share a row of a bucket.

        It is the smallest one for which the devices divide B, and T of every sequence.

        Raises:
          ValueError: if there is none.
        """
        cut = self.can_cut(bucket)
        if cut is not None:
            return cut
        if len(self.cuts) == 1:
            self.part_size(bucket.batch_size)
        raise ValueError(
            f"{bucket} cannot be divided over {self.num_parts} devices along the mesh "
            f"axes {self.axes}, of which up to {self.cuts[-1]} may share a row. Plan "
            "with a larger `batch_size_multiple` or with a `seq_len_multiple` of "
            f"{self.cuts[-1]}, or let more share a row: `data_mesh(max_row_shards=)`."
        )

    def of(self, bucket: Bucket) -> RowShard:
        """Returns the shard of the batches of a bucket, in which no parts are joined.

        Raises:
          ValueError: if the devices cannot divide the bucket.
        """
        cut = self.cut(bucket)
        if cut == 1:
            return self
        parts = tuple(sorted({part // cut for part in self.parts}))
        return RowShard(parts, self.num_parts // cut, self.axes)

    def part_size(self, batch_size: int) -> int:
        """Returns the number of rows of one part.

        Args:
          batch_size: B, the number of rows of the global batch.

        Raises:
          ValueError: if `num_parts` does not divide `batch_size`.
        """
        if batch_size % self.num_parts:
            raise ValueError(
                f"`batch_size={batch_size}` cannot be split into {self.num_parts} "
                f"equal parts along the mesh axes {self.axes}. Plan with "
                f"`batch_size_multiple={self.num_parts}`, or use a number of devices "
                "that divides every B."
            )
        return batch_size // self.num_parts

    def rows(self, batch_size: int) -> np.ndarray:
        """Returns the rows of this process, `[B_local]` int64, ascending.

        Args:
          batch_size: B, the number of rows of the global batch.

        Raises:
          ValueError: if `num_parts` does not divide `batch_size`.
        """
        size = self.part_size(batch_size)
        starts = np.array(self.parts, np.int64)[:, None] * size
        return (starts + np.arange(size)).reshape(-1)


def prime_factors(number: int) -> list[int]:
    """Returns the prime factors of a number in ascending order.

    Example:
      >>> prime_factors(12)
      [2, 2, 3]
    """
    factors, factor = [], 2
    while number > 1:
        while number % factor == 0:
            factors.append(factor)
            number //= factor
        factor += 1
    return factors


def cuts_of(sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns the numbers of devices that may share a row.

    Example: a row takes the last axes first.
      >>> cuts_of([2, 3])
      (1, 3, 6)

    Args:
      sizes: the sizes of the row axes of a mesh.
    """
    products = itertools.accumulate((1, *reversed(sizes)), operator.mul)
    return tuple(dict.fromkeys(products))


def checked_shard(shard: RowShard | None) -> RowShard:
    """Returns a shard, by default that of a process which needs all rows.

    Raises:
      ValueError: if `shard` is anything else.
    """
    if shard is None:
        return RowShard()
    check_type("shard", shard, RowShard, "Pass `jb.sharding.local_rows(mesh)`.")
    return shard


class Batch(NamedTuple):
    """A batch of arrays: a pytree, on the host (numpy) or on devices (`jax.Array`).

    In `segment_ids`, 0 is padding and the examples of a row are numbered from 1. In
    `positions`, every example starts at 0:

        tokens       7 3 9 5 0 0
        segment_ids  1 1 1 1 0 0
        positions    0 1 2 3 0 0

    The mask and the number of tokens and examples are computed from `segment_ids`.

    Attributes:
      features: name -> `[B, T, ...]` for sequences, `[B, ...]` for other features. An
        image, with axes of two sequences, is `[B, T, T', ...]`.
      segment_ids: name -> `[B, T]` int32, one entry for each sequence that has its own
        lengths (usually just one).
      positions: name -> `[B, T]` int32, with the same names as `segment_ids`.
    """

    features: dict[str, Any]
    segment_ids: dict[str, Any]
    positions: dict[str, Any]

    @property
    def mask(self) -> Any:
        """`[B, T]` bool: True for real tokens, False for padding.

        For shapes and dtypes, as in `MeshLoader.specs`, it is a shape and a dtype.

        Raises:
          ValueError: if the batch has several sequences, each with its own lengths.
        """
        if len(self.segment_ids) != 1:
            raise ValueError(
                f"`mask` is ambiguous: the sequences {sorted(self.segment_ids)} have "
                "different lengths. Use `segment_ids[name] > 0`."
            )
        (ids,) = self.segment_ids.values()
        if not hasattr(ids, "__getitem__"):  # a `jax.ShapeDtypeStruct`
            return type(ids)(ids.shape, np.dtype(bool), sharding=ids.sharding)
        return ids > 0

    @property
    def num_tokens(self) -> Any:
        """`[]` int: real tokens, over all sequences."""
        return sum((ids > 0).sum() for ids in self.segment_ids.values())

    @property
    def num_examples(self) -> Any:
        """`[]` int: examples; empty rows do not count."""
        return next(iter(self.segment_ids.values())).max(axis=1).sum()

    @property
    def bucket(self) -> Bucket:
        """The shape (B, T). It is a bucket of the plan only if the batch is global.

        With several sequences of separate lengths, there is a T for each.
        """
        sizes = {name: ids.shape[1] for name, ids in self.segment_ids.items()}
        (name, ids), *others = self.segment_ids.items()
        return Bucket(ids.shape[0], Sizes(sizes) if others else sizes[name])

    def as_dict(self, style: Literal["grain", "maxtext"] = "grain") -> dict[str, Any]:
        """Returns all arrays in one flat dict, with the names of another library.

        Args:
          style: "grain" for the names `x`, `x_segment_ids` and `x_positions`, "maxtext"
            for `x`, `x_segmentation` and `x_position`.

        Raises:
          ValueError: if the style is unknown, or a feature already has such a name.
        """
        suffixes = {
            "grain": ("segment_ids", "positions"),
            "maxtext": ("segmentation", "position"),
        }
        check_choice("style", style, list(suffixes))
        ids, positions = suffixes[style]
        derived = {
            **{f"{name}_{ids}": value for name, value in self.segment_ids.items()},
            **{f"{name}_{positions}": value for name, value in self.positions.items()},
        }
        taken = sorted(derived.keys() & self.features.keys())
        if taken:
            raise ValueError(f"`features` already has {taken}. Rename these features.")
        return {**self.features, **derived}


def check_is_batch(name: str, batch: Any) -> None:
    """Raises a ValueError if an argument is not a batch."""
    remedy = (
        "Pass a batch of a loader, or create one with `collate_rows`. Only a step with "
        "`accumulate=True` takes a tuple of them."
    )
    check_type(name, batch, Batch, remedy)
