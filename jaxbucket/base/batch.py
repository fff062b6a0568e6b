"""One step's rows, and their arrays.

Index kinds, so that no two are mixed up:

* an *example* is one record of the source, named by its index in `lengths`;
* a *row* is one line of a batch: it holds an example, or nothing (`-1`);
* a *step* is one optimizer update, of one batch, or of several micro-batches.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxbucket.base.buckets import Bucket
from jaxbucket.base.checks import check_integer, check_positive

EMPTY_ROW = -1


@dataclasses.dataclass(frozen=True, eq=False)
class BatchIndices:
    """What one step trains on.

    Attributes:
      bucket: the global shape (B, T).
      rows: `[B]` int64, the example in each row; -1 marks an empty row. Of packed rows
        `[B, max_segments]`: the examples of each row, and -1 behind the last.
    """

    bucket: Bucket
    rows: np.ndarray

    @property
    def num_examples(self) -> int:
        """Those that are in its rows."""
        return int(np.count_nonzero(self.rows != EMPTY_ROW))


@dataclasses.dataclass(frozen=True)
class RowShard:
    """Which rows of every global batch this process must load.

    A mesh cuts the B rows into `num_parts` equal, contiguous parts; the devices of
    this process hold `parts` of them. Two processes may need the same part (a model
    axis across hosts), and the parts of one process need not be neighbours.

    Example:
      >>> RowShard(parts=(0, 3), num_parts=4).rows(8)
      array([0, 1, 6, 7])

    Attributes:
      parts: the parts to load, ascending.
      num_parts: into how many parts the batch is cut.
      axes: the mesh axes that cut it, for messages.
    """

    parts: tuple[int, ...] = (0,)
    num_parts: int = 1
    axes: tuple[str, ...] = ()

    def __post_init__(self):
        parts = tuple(check_integer("parts", part) for part in self.parts)
        object.__setattr__(self, "parts", parts)
        object.__setattr__(
            self, "num_parts", check_positive("num_parts", self.num_parts)
        )
        ascending = all(a < b for a, b in zip(self.parts, self.parts[1:], strict=False))
        inside = all(0 <= part < self.num_parts for part in self.parts)
        if not (self.parts and ascending and inside):
            raise ValueError(
                f"`parts={self.parts}` must be ascending, distinct and in "
                f"[0, {self.num_parts})."
            )

    def part_size(self, batch_size: int) -> int:
        """Returns how many rows of a global batch one part has.

        Raises:
          ValueError: if `num_parts` does not divide `batch_size`.
        """
        if batch_size % self.num_parts:
            raise ValueError(
                f"`batch_size={batch_size}` cannot be cut into {self.num_parts} equal "
                f"parts by the mesh axes {self.axes}. Plan with `batch_size_multiple="
                f"{self.num_parts}` or a multiple of it, or use a mesh whose batch "
                f"axes divide {batch_size}."
            )
        return batch_size // self.num_parts

    def rows(self, batch_size: int) -> np.ndarray:
        """Returns `[B_local]` int64: the rows of a global batch, ascending."""
        size = self.part_size(batch_size)
        starts = np.array(self.parts, np.int64)[:, None] * size
        return (starts + np.arange(size)).reshape(-1)


class Batch(NamedTuple):
    """One batch, on the host (numpy) or on devices (`jax.Array`): a pytree for both.

    In `segment_ids` 0 is padding and examples in a row count from 1; `positions`
    restart at 0 with every example:

        tokens       7 3 9 5 0 0
        segment_ids  1 1 1 1 0 0
        positions    0 1 2 3 0 0

    Everything else about validity is derived from them, never carried beside them.

    Attributes:
      features: name -> `[B, T, ...]` for sequences, `[B, ...]` for the rest.
      segment_ids: name -> `[B, T]` int32, one entry for each sequence that has
        lengths of its own (one in the ordinary case).
      positions: name -> `[B, T]` int32, the same names.
    """

    features: dict[str, Any]
    segment_ids: dict[str, Any]
    positions: dict[str, Any]

    @property
    def mask(self) -> Any:
        """`[B, T]` bool: True where a token is real.

        Raises:
          ValueError: if several sequences have lengths of their own.
        """
        if len(self.segment_ids) != 1:
            raise ValueError(
                f"`mask` is ambiguous: {sorted(self.segment_ids)} have lengths of "
                "their own. Use `segment_ids[name] > 0`."
            )
        return next(iter(self.segment_ids.values())) > 0

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
        """The shape (B, T); that of the plan only if the batch is a global one.

        Of several sequences with lengths of their own, T is the sum of theirs.
        """
        shapes = [ids.shape for ids in self.segment_ids.values()]
        return Bucket(shapes[0][0], sum(seq_len for _, seq_len in shapes))

    def as_dict(self, style: Literal["grain", "maxtext"] = "grain") -> dict[str, Any]:
        """Returns one flat dict under the names that other libraries use.

        Args:
          style: "grain" gives `x`, `x_segment_ids`, `x_positions`; "maxtext" gives
            `x`, `x_segmentation`, `x_position`.

        Raises:
          ValueError: for another style, or features that have such names already.
        """
        suffixes = {
            "grain": ("segment_ids", "positions"),
            "maxtext": ("segmentation", "position"),
        }
        if style not in suffixes:
            raise ValueError(f"`style={style!r}`: choose 'grain' or 'maxtext'.")
        ids, positions = suffixes[style]
        derived = {
            **{f"{name}_{ids}": value for name, value in self.segment_ids.items()},
            **{f"{name}_{positions}": value for name, value in self.positions.items()},
        }
        taken = sorted(derived.keys() & self.features.keys())
        if taken:
            raise ValueError(f"`features` already has {taken}: rename them.")
        return {**self.features, **derived}
