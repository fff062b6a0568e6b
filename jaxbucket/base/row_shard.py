"""`RowShard`, the rows of a batch that a process loads, and how rows are cut."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxbucket.base.bucket import Bucket
from jaxbucket.base.checks import check_integer, check_positive, check_type


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

    def find_cut(self, bucket: Bucket) -> int | None:
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
        cut = self.find_cut(bucket)
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


def row_axes(max_row_shards: int, num_devices: int | None = None) -> list[int]:
    """Returns the sizes of the row axes of a mesh: the prime factors of their product.

    Example:
      >>> row_axes(12)
      [2, 2, 3]

    Args:
      max_row_shards: the largest number of devices that may share a row.
      num_devices: the devices of the mesh, if they are known.

    Raises:
      ValueError: if `max_row_shards` is not positive, or does not divide the devices.
    """
    number, factors = check_positive("max_row_shards", max_row_shards), []
    if num_devices is not None and num_devices % number:
        raise ValueError(
            f"`max_row_shards={max_row_shards}` must divide the number of devices, "
            f"{num_devices}."
        )
    while number > 1:
        factors.append(next(i for i in itertools.count(2) if number % i == 0))
        number //= factors[-1]
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
    """Returns a shard, by default that of a process which needs all rows."""
    if shard is None:
        return RowShard()
    check_type("shard", shard, RowShard, "Pass `jb.sharding.local_rows(mesh)`.")
    return shard


def spec_names(axes: Any) -> tuple[str, ...]:
    """Returns an entry of a `PartitionSpec` as a tuple."""
    return (axes,) if isinstance(axes, str) else tuple(axes or ())
