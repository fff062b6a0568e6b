"""The rows of a batch and their arrays.

Three kinds of index are used throughout:

* an *example* is one record of the source, identified by its index in `lengths`;
* a *row* is one line of a batch, which holds an example or is empty (`-1`);
* a *step* is one optimizer update, with one batch or with several micro-batches.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from jaxbucket.base.bucket import Bucket
from jaxbucket.base.checks import check_type
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


class Batch(NamedTuple):
    """A batch of arrays: a pytree, on the host (numpy) or on devices (`jax.Array`).

    In `segment_ids`, 0 is padding and the examples of a row are numbered from 1, with
    the same number in each of several sequences. In `positions`, every example starts
    at 0:

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
    def row_mask(self) -> Any:
        """`[B]` bool: True for rows with an example, False for empty rows.

        A mean over the rows of a batch must not count empty rows.

        Example:
          >>> ids = {"tokens": np.array([[1, 1, 0], [0, 0, 0]])}
          >>> Batch({}, ids, ids).row_mask
          array([ True, False])
        """
        return self.segments_per_row > 0

    @property
    def segments_per_row(self) -> Any:
        """`[B]` int: the number of examples in each row."""
        most, *others = (ids.max(axis=1) for ids in self.segment_ids.values())
        for number in others:  # An example may lack a sequence.
            most = most.__array_namespace__().maximum(most, number)
        return most

    @property
    def num_tokens(self) -> Any:
        """`[]` int: real tokens, over all sequences."""
        return sum((ids > 0).sum() for ids in self.segment_ids.values())

    @property
    def num_examples(self) -> Any:
        """`[]` int: examples; empty rows do not count."""
        return self.segments_per_row.sum()

    @property
    def bucket(self) -> Bucket:
        """The shape (B, T). It is a bucket of the plan only if the batch is global.

        With several sequences of separate lengths, there is a T for each.
        """
        sizes = {name: ids.shape[1] for name, ids in self.segment_ids.items()}
        (name, ids), *others = self.segment_ids.items()
        return Bucket(ids.shape[0], Sizes(sizes) if others else sizes[name])

    def as_dict(self) -> dict[str, Any]:
        """Returns all arrays in one flat dict: `x`, `x_segment_ids`, `x_positions`.

        These are the names of Grain's packing. `jaxbucket.convert_batch` returns a
        batch under those of MaxText, T5, Hugging Face and others.

        Raises:
          ValueError: if a feature already has such a name.
        """
        derived = {
            **{f"{name}_segment_ids": x for name, x in self.segment_ids.items()},
            **{f"{name}_positions": x for name, x in self.positions.items()},
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
