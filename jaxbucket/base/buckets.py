"""Batch shapes `[B, T]`, and a closed set of them."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.checks import (
    MAX_LENGTH,
    check_choice,
    check_costs,
    check_countable,
    check_lengths,
    check_positive,
    overlong_message,
    unsplit_message,
)
from jaxbucket.base.digest import digest

Overlong: TypeAlias = Literal["error", "drop", "truncate", "split"]
Group: TypeAlias = Literal["same", "mixed"]

OVERLONG: tuple[str, ...] = get_args(Overlong)
GROUPS: tuple[str, ...] = get_args(Group)
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
