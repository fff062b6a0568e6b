"""The types every room speaks: shapes, plans, one step's rows, and batches.

Index kinds, so that no two are mixed up:

* an *example* is one record of the source, named by its index in `lengths`;
* a *row* is one line of a batch: it holds an example, or nothing (`-1`);
* a *step* is one optimizer update, of one batch, or of several micro-batches.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.checks import (
    MAX_LENGTH,
    check_choice,
    check_costs,
    check_countable,
    check_integer,
    check_lengths,
    check_positive,
    overlong_message,
    unsplit_message,
)

Overlong: TypeAlias = Literal["error", "drop", "truncate", "split"]
Group: TypeAlias = Literal["same", "mixed"]

OVERLONG: tuple[str, ...] = get_args(Overlong)
GROUPS: tuple[str, ...] = get_args(Group)
EMPTY_ROW = -1
# `assign` gives 16-bit integers.
_MAX_BUCKETS = 2**15 - 1
_PLAN_FORMAT = "jaxbucket.BucketPlan"
# Plans that know what a step costs are of version 2; all others are as they were.
_PLAN_VERSIONS = (1, 2)


@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """One static batch shape `[B, T]`, in array order.

    Attributes:
      batch_size: B, rows of the global batch, over all devices.
      seq_len: T, positions in each row.
    """

    batch_size: int
    seq_len: int

    def __post_init__(self):
        for name in ("batch_size", "seq_len"):
            object.__setattr__(self, name, check_positive(name, getattr(self, name)))
        check_countable(
            self.num_tokens,
            f"The tokens of `batch_size={self.batch_size}` rows of "
            f"`seq_len={self.seq_len}`",
            "Lower one of these.",
        )

    @property
    def num_tokens(self) -> int:
        """B * T, padding counted."""
        return self.batch_size * self.seq_len

    def __str__(self) -> str:
        return f"[{self.batch_size}, {self.seq_len}]"


@dataclasses.dataclass(frozen=True)
class BucketPlan:
    """A closed set of batch shapes, and what happens to examples too long for it.

    Example:
      >>> plan = BucketPlan((Bucket(8, 128), Bucket(2, 512)), max_tokens=1024)
      >>> plan.assign([5, 128, 129, 512])
      array([0, 0, 1, 1], dtype=int16)
      >>> BucketPlan.from_json(plan.to_json()) == plan
      True

    Attributes:
      buckets: the shapes, by strictly increasing `seq_len`.
      max_tokens: no bucket's B * T exceeds it, padding counted.
      batch_size_multiple: every B is a multiple of it.
      seq_len_multiple: every T is a multiple of it.
      overlong: what happens to an example longer than the last bucket: "error"
        refuses it, "drop" leaves it out, "truncate" cuts it to the last bucket,
        "split" makes chunks of it, by `split_source`: the plan takes their lengths.
      step_costs: what a step of each bucket costs, by which remainders flow and an
        epoch is predicted; None counts tokens, B * T.
      cost_unit: what they are counted in, such as "s".

    Raises:
      ValueError: if a bucket breaks one of these promises.
    """

    buckets: tuple[Bucket, ...]
    max_tokens: int
    batch_size_multiple: int = 1
    seq_len_multiple: int = 1
    overlong: Overlong = "error"
    step_costs: tuple[float, ...] | None = None
    cost_unit: str = "tokens"

    def __post_init__(self):
        object.__setattr__(self, "buckets", tuple(self.buckets))
        for name in ("max_tokens", "batch_size_multiple", "seq_len_multiple"):
            object.__setattr__(self, name, check_positive(name, getattr(self, name)))
        check_choice("overlong", self.overlong, OVERLONG)
        if not self.buckets:
            raise ValueError("`buckets` is empty: a plan needs at least one shape.")
        if len(self.buckets) > _MAX_BUCKETS:
            raise ValueError(
                f"`buckets` has {len(self.buckets)} shapes, more than {_MAX_BUCKETS}. "
                "Each costs a compilation: plan with fewer."
            )
        for bucket in self.buckets:
            if not isinstance(bucket, Bucket):
                raise ValueError(
                    f"`buckets` holds {bucket!r}: make it a `Bucket(batch_size, "
                    "seq_len)`."
                )
            self._check_bucket(bucket)
        if np.any(np.diff(self.boundaries) <= 0):
            raise ValueError(
                f"`buckets` has seq_lens {self.boundaries.tolist()}: sort them in "
                "strictly increasing order."
            )
        if not isinstance(self.cost_unit, str):
            raise ValueError(f"`cost_unit={self.cost_unit!r}` is no name of a unit.")
        if self.step_costs is None and self.cost_unit != "tokens":
            raise ValueError(
                f"`cost_unit={self.cost_unit!r}` is of no `step_costs`: give them, or "
                "leave it out."
            )
        if self.step_costs is not None:
            costs = check_costs("step_costs", self.step_costs, len(self.buckets))
            object.__setattr__(self, "step_costs", tuple(costs.tolist()))

    @classmethod
    def from_shapes(
        cls,
        shapes: Iterable[tuple[int, int]],
        *,
        max_tokens: int | None = None,
        **fields: Any,
    ) -> BucketPlan:
        """Returns the plan of given shapes (B, T), in any order.

        Example:
          >>> plan = BucketPlan.from_shapes([(16, 256), (8, 512), (32, 128)])
          >>> plan.boundaries, plan.max_tokens
          (array([128, 256, 512]), 4096)

        Args:
          shapes: each B and T.
          max_tokens: by default the largest B * T.
          **fields: the plan's others.

        Raises:
          ValueError: if one is no pair of positive integers, or breaks a promise.
        """
        buckets = []
        for shape in shapes:
            try:
                batch_size, seq_len = shape
            except (TypeError, ValueError):
                raise ValueError(
                    f"`shapes` holds {shape!r}: give (B, T) for each."
                ) from None
            buckets.append(Bucket(batch_size, seq_len))
        buckets.sort(key=lambda bucket: bucket.seq_len)
        if max_tokens is None:
            max_tokens = max((bucket.num_tokens for bucket in buckets), default=1)
        return cls(tuple(buckets), max_tokens=max_tokens, **fields)

    def _check_bucket(self, bucket: Bucket) -> None:
        if bucket.num_tokens > self.max_tokens:
            raise ValueError(
                f"Bucket {bucket} holds {bucket.num_tokens} tokens, more than "
                f"`max_tokens={self.max_tokens}`. Lower its batch_size to "
                f"{self.max_tokens // bucket.seq_len}."
            )
        for name in ("batch_size", "seq_len"):
            value, multiple = getattr(bucket, name), getattr(self, f"{name}_multiple")
            if value % multiple:
                raise ValueError(
                    f"Bucket {bucket}: `{name}={value}` is not a multiple of "
                    f"`{name}_multiple={multiple}`."
                )

    def __len__(self) -> int:
        return len(self.buckets)

    @functools.cached_property
    def boundaries(self) -> np.ndarray:
        """`[K]` int64: the inclusive upper length of every bucket."""
        return np.array([bucket.seq_len for bucket in self.buckets], np.int64)

    @functools.cached_property
    def batch_sizes(self) -> np.ndarray:
        """`[K]` int64: B of every bucket."""
        return np.array([bucket.batch_size for bucket in self.buckets], np.int64)

    @functools.cached_property
    def costs(self) -> np.ndarray:
        """`[K]`: what a step of each bucket costs, in `cost_unit`; B * T by default."""
        if self.step_costs is None:
            return self.batch_sizes * self.boundaries
        return np.array(self.step_costs)

    @property
    def max_seq_len(self) -> int:
        """T of the last bucket."""
        return self.buckets[-1].seq_len

    def check(self, lengths: ArrayLike) -> np.ndarray:
        """Returns `lengths` as an integer array `[N]`, if the plan takes them all.

        Raises:
          ValueError: for lengths that `check_lengths` refuses, or beyond the last
            bucket under `overlong="error"` or "split": there these are the chunks'.
        """
        lengths = check_lengths(lengths)
        if self.overlong == "error" and lengths.max() > self.max_seq_len:
            raise ValueError(overlong_message(lengths, self.max_seq_len))
        if self.overlong == "split" and lengths.max() > self.max_seq_len:
            raise ValueError(unsplit_message(lengths, self.max_seq_len))
        return lengths

    def assign(self, lengths: ArrayLike) -> np.ndarray:
        """Returns the bucket of each example: the shortest one that holds it.

        Args:
          lengths: `[N]` integers.

        Returns:
          `[N]` int16: an index into `buckets`, or -1 for an example that
          `overlong="drop"` leaves out.

        Raises:
          ValueError: for lengths that `check` refuses.
        """
        lengths = self.check(lengths)
        # Equal dtypes keep searchsorted from converting the long array.
        edges = np.minimum(self.boundaries, MAX_LENGTH).astype(lengths.dtype)
        index = _searchsorted_in_chunks(edges, lengths)
        over = index == len(self)
        if self.overlong == "truncate":
            index[over] = len(self) - 1
        elif self.overlong == "drop":
            index[over] = -1
        return index

    def kept(self, lengths: ArrayLike) -> np.ndarray:
        """Returns the positions that rows hold of each example, `[n]`.

        Without those that `overlong="drop"` leaves out, and cut by "truncate".

        Raises:
          ValueError: for lengths that `check` refuses.
        """
        lengths = self.check(lengths)
        longest = min(self.max_seq_len, MAX_LENGTH)
        return np.minimum(lengths[self.assign(lengths) >= 0], longest)

    def rows_together(self, accumulate: int) -> np.ndarray:
        """Returns `[K]` int64, the rows of so many batches of each bucket.

        Raises:
          ValueError: if 64 bits do not count their tokens.
        """
        most = max(bucket.num_tokens for bucket in self.buckets) * accumulate
        check_countable(
            most,
            f"The tokens of a step of `accumulate={accumulate}` batches",
            "Lower it, or plan with a smaller `max_tokens`.",
        )
        return self.batch_sizes * accumulate

    @functools.cached_property
    def fingerprint(self) -> str:
        """32 hex digits that name these shapes and this policy."""
        return digest(self.to_json().encode())

    def to_json(self) -> str:
        """Returns the plan as one JSON object; `from_json` is the inverse."""
        fields: dict[str, Any] = {
            "format": _PLAN_FORMAT,
            "version": 1 if self.step_costs is None else 2,
            "buckets": [[b.batch_size, b.seq_len] for b in self.buckets],
            "max_tokens": self.max_tokens,
            "batch_size_multiple": self.batch_size_multiple,
            "seq_len_multiple": self.seq_len_multiple,
            "overlong": self.overlong,
        }
        if self.step_costs is not None:
            fields |= {"step_costs": self.step_costs, "cost_unit": self.cost_unit}
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> BucketPlan:
        """Reads a plan that `to_json` wrote.

        Raises:
          ValueError: if `text` is truncated, foreign, of another version, or breaks
            a promise of the plan.
        """
        remedy = "Write the plan again with `plan.to_json()`."
        try:
            fields = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(
                f"The plan is not valid JSON ({error}). {remedy}"
            ) from None
        if not isinstance(fields, dict) or fields.get("format") != _PLAN_FORMAT:
            raise ValueError(f'The JSON has no "format": "{_PLAN_FORMAT}". {remedy}')
        version = fields.get("version")
        if version not in _PLAN_VERSIONS or isinstance(version, bool):
            raise ValueError(
                f"The plan has version {version!r}; this jaxbucket reads versions "
                f"{_PLAN_VERSIONS[0]} to {_PLAN_VERSIONS[-1]}. {remedy}"
            )
        try:
            pairs = fields["buckets"]
            if not isinstance(pairs, list) or not all(map(_is_pair, pairs)):
                raise ValueError(
                    f"The plan's buckets are {pairs!r}, not a list of [B, T]. {remedy}"
                )
            buckets = tuple(Bucket(b, t) for b, t in pairs)
            names = [f.name for f in dataclasses.fields(cls) if f.name != "buckets"]
            if version == 1:
                names = [n for n in names if n not in ("step_costs", "cost_unit")]
            return cls(buckets, **{name: fields[name] for name in names})
        except KeyError as error:
            raise ValueError(f"The plan lacks the field {error}. {remedy}") from None


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2


def _searchsorted_in_chunks(edges: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    # int16 straight away: the int64 result for 10M lengths would be 80 MB.
    index = np.empty(lengths.size, np.int16)
    for start in range(0, lengths.size, 1 << 18):
        part = slice(start, start + (1 << 18))
        index[part] = np.searchsorted(edges, lengths[part])
    return index


def digest(*parts: bytes | memoryview) -> str:
    """Returns 32 hex digits of BLAKE2b over the parts in turn."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(part)
    return state.hexdigest()


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
