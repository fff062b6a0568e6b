"""The rows that a loss is given: the whole batch, or those of one device."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax


class Rows(Protocol):
    """The local rows of the global batch."""

    def first_row(self, num_rows: int) -> Any:
        """Returns the global index of the first of the `num_rows` local rows."""
        ...

    def sum_over_rows(self, sums: Any) -> Any:
        """Returns the sums over all rows, given the sums over the local rows."""
        ...


@dataclasses.dataclass(frozen=True)
class WholeBatch:
    """All rows of the batch are local."""

    def first_row(self, num_rows: int) -> int:
        return 0

    def sum_over_rows(self, sums: Any) -> Any:
        return sums


@dataclasses.dataclass(frozen=True)
class MappedRows:
    """The rows of one device, in a function that is mapped over named axes.

    Attributes:
      axes: the axes over which rows are sharded, the slowest varying first.
    """

    axes: tuple[str, ...]

    def first_row(self, num_rows: int) -> jax.Array:
        return jax.lax.axis_index(self.axes) * num_rows

    def sum_over_rows(self, sums: Any) -> Any:
        return jax.lax.psum(sums, self.axes)
