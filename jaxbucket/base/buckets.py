"""`Bucket`, one batch shape `[B, T]`, and `BucketPlan`, a closed set of shapes."""

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
# `assign` returns 16-bit integers.
_MAX_BUCKETS = 2**15 - 1
_PLAN_FORMAT = "jaxbucket.BucketPlan"
# Plans with step costs are written as version 2, all others still as version 1.
_PLAN_VERSIONS = (1, 2)


@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """One static batch shape `[B, T]`, in array order.

    Attributes:
      batch_size: B, the number of rows of the global batch, over all devices.
      seq_len: T, the number of positions in each row.

    Raises:
      ValueError: if a size is not a positive integer, or B * T is not below 2**62.
    """

    batch_size: int
    seq_len: int

    def __post_init__(self):
        for name in ("batch_size", "seq_len"):
            object.__setattr__(self, name, check_positive(name, getattr(self, name)))
        check_countable(
            self.num_tokens,
            f"The number of tokens in `batch_size={self.batch_size}` rows of "
            f"`seq_len={self.seq_len}`",
            "Lower one of the two.",
        )

    @property
    def num_tokens(self) -> int:
        """B * T, including padding."""
        return self.batch_size * self.seq_len

    def __str__(self) -> str:
        return f"[{self.batch_size}, {self.seq_len}]"


@dataclasses.dataclass(frozen=True)
class BucketPlan:
    """A closed set of batch shapes, and a policy for examples that are too long.

    Example:
      >>> plan = BucketPlan((Bucket(8, 128), Bucket(2, 512)), max_tokens=1024)
      >>> plan.assign([5, 128, 129, 512])
      array([0, 0, 1, 1], dtype=int16)
      >>> BucketPlan.from_json(plan.to_json()) == plan
      True

    Attributes:
      buckets: the shapes, by strictly increasing `seq_len`.
      max_tokens: the largest allowed B * T, padding counted.
      batch_size_multiple: every B is a multiple of this number.
      seq_len_multiple: every T is a multiple of this number.
      overlong: what happens to an example longer than the last bucket: "error" raises
        an error, "drop" leaves the example out, "truncate" shortens it to the last
        bucket. With "split", the plan is for the chunks from `split_source`, and
        expects their lengths.
      step_costs: the cost of a step of each bucket, used to assign remainders to
        buckets and to predict the cost of an epoch; None counts tokens, B * T.
      cost_unit: the unit of `step_costs`, such as "s".
      packed: whether the shapes were chosen for rows of several examples, as by
        `plan_packing`. Such a plan has to be used with a `Packing`.

    Raises:
      ValueError: if a field is invalid, or a bucket violates one of these constraints.
    """

    buckets: tuple[Bucket, ...]
    max_tokens: int
    batch_size_multiple: int = 1
    seq_len_multiple: int = 1
    overlong: Overlong = "error"
    step_costs: tuple[float, ...] | None = None
    cost_unit: str = "tokens"
    packed: bool = False

    def __post_init__(self):
        object.__setattr__(self, "buckets", tuple(self.buckets))
        for name in ("max_tokens", "batch_size_multiple", "seq_len_multiple"):
            object.__setattr__(self, name, check_positive(name, getattr(self, name)))
        check_choice("overlong", self.overlong, OVERLONG)
        if not self.buckets:
            raise ValueError("`buckets` is empty. A plan needs at least one shape.")
        if len(self.buckets) > _MAX_BUCKETS:
            raise ValueError(
                f"`buckets` has {len(self.buckets)} shapes, more than {_MAX_BUCKETS}. "
                "Plan with fewer: each shape costs a compilation."
            )
        for bucket in self.buckets:
            if not isinstance(bucket, Bucket):
                raise ValueError(
                    f"`buckets` contains {bucket!r}. Use `Bucket(batch_size, seq_len)`."
                )
            self._check_bucket(bucket)
        if np.any(np.diff(self.boundaries) <= 0):
            raise ValueError(
                f"`buckets` has seq_lens {self.boundaries.tolist()}. Sort the buckets "
                "by strictly increasing `seq_len`."
            )
        if not isinstance(self.packed, bool):
            raise ValueError(f"`packed={self.packed!r}` is not True or False.")
        if not isinstance(self.cost_unit, str):
            raise ValueError(
                f"`cost_unit={self.cost_unit!r}` is not a string. Pass the name of a "
                "unit, such as 's'."
            )
        if self.step_costs is None and self.cost_unit != "tokens":
            raise ValueError(
                f"`cost_unit={self.cost_unit!r}` requires `step_costs`. Pass both, or "
                "remove `cost_unit`."
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
        """Returns a plan with the given shapes.

        Example:
          >>> plan = BucketPlan.from_shapes([(16, 256), (8, 512), (32, 128)])
          >>> plan.boundaries, plan.max_tokens
          (array([128, 256, 512]), 4096)

        Args:
          shapes: pairs (B, T), in any order.
          max_tokens: the maximum B * T; by default the B * T of the largest shape.
          **fields: the other attributes of the plan.

        Raises:
          ValueError: if a shape is not a pair of positive integers, or violates a
            constraint of the plan.
        """
        buckets = []
        for shape in shapes:
            try:
                batch_size, seq_len = shape
            except (TypeError, ValueError):
                raise ValueError(
                    f"`shapes` contains {shape!r}. Pass pairs (B, T)."
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
                f"`max_tokens={self.max_tokens}`. Lower its `batch_size` to "
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
        """`[K]` int64: the longest length of each bucket, inclusive."""
        return np.array([bucket.seq_len for bucket in self.buckets], np.int64)

    @functools.cached_property
    def batch_sizes(self) -> np.ndarray:
        """`[K]` int64: B of each bucket."""
        return np.array([bucket.batch_size for bucket in self.buckets], np.int64)

    @functools.cached_property
    def costs(self) -> np.ndarray:
        """`[K]`: the cost of a step of each bucket in `cost_unit`; B * T by default."""
        if self.step_costs is None:
            return self.batch_sizes * self.boundaries
        return np.array(self.step_costs)

    @property
    def unpacked(self) -> BucketPlan:
        """The same shapes for rows of one example, or for lengths of packed rows."""
        return dataclasses.replace(self, packed=False)

    @property
    def max_seq_len(self) -> int:
        """T of the last bucket."""
        return self.buckets[-1].seq_len

    def check(self, lengths: ArrayLike) -> np.ndarray:
        """Returns `lengths` as an integer array `[N]`, after checking them.

        Args:
          lengths: `[N]` integers, one per example; with `overlong="split"`, one per
            chunk.

        Raises:
          ValueError: if the lengths are not positive integers, or if one is longer than
            the last bucket and `overlong` is "error" or "split".
        """
        lengths = check_lengths(lengths)
        if self.overlong == "error" and lengths.max() > self.max_seq_len:
            raise ValueError(overlong_message(lengths, self.max_seq_len))
        if self.overlong == "split" and lengths.max() > self.max_seq_len:
            raise ValueError(unsplit_message(lengths, self.max_seq_len))
        return lengths

    def assign(self, lengths: ArrayLike) -> np.ndarray:
        """Returns the bucket of each example: the shortest bucket that it fits in.

        Args:
          lengths: `[N]` integers, as for `check`.

        Returns:
          `[N]` int16: an index into `buckets`, or -1 for an example that
          `overlong="drop"` leaves out.

        Raises:
          ValueError: if `check` raises it.
        """
        lengths = self.check(lengths)
        # With equal dtypes, searchsorted does not convert the long array.
        edges = np.minimum(self.boundaries, MAX_LENGTH).astype(lengths.dtype)
        index = _searchsorted_in_chunks(edges, lengths)
        over = index == len(self)
        if self.overlong == "truncate":
            index[over] = len(self) - 1
        elif self.overlong == "drop":
            index[over] = -1
        return index

    def kept_lengths(self, lengths: ArrayLike) -> np.ndarray:
        """Returns the lengths of the examples in batches, `[n]`.

        Examples that `overlong="drop"` leaves out are missing, and "truncate" limits
        the length to the last bucket.

        Args:
          lengths: `[N]` integers, as for `check`.

        Raises:
          ValueError: if `check` raises it.
        """
        lengths = self.check(lengths)
        longest = min(self.max_seq_len, MAX_LENGTH)
        return np.minimum(lengths[self.assign(lengths) >= 0], longest)

    def rows_per_step(self, accumulate: int) -> np.ndarray:
        """Returns the rows of `accumulate` batches of each bucket, `[K]` int64.

        Args:
          accumulate: the number of micro-batches per step.

        Raises:
          ValueError: if the tokens of that many batches do not fit in 64 bits.
        """
        most = max(bucket.num_tokens for bucket in self.buckets) * accumulate
        check_countable(
            most,
            f"The number of tokens in a step of `accumulate={accumulate}` batches",
            "Lower `accumulate`, or plan with a smaller `max_tokens`.",
        )
        return self.batch_sizes * accumulate

    @functools.cached_property
    def fingerprint(self) -> str:
        """32 hex digits that identify the plan: a hash of its JSON."""
        return digest(self.to_json().encode())

    def to_json(self) -> str:
        """Returns the plan as a JSON object; `from_json` is the inverse."""
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
        if self.packed:
            fields["packed"] = True
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> BucketPlan:
        """Returns the plan that `to_json` wrote.

        Args:
          text: the JSON object.

        Raises:
          ValueError: if `text` is not valid JSON, does not hold a plan or holds one of
            an unknown version, or if the plan itself is invalid.
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
            absent = {"buckets", *({"packed"} - fields.keys())}
            if version == 1:
                absent |= {"step_costs", "cost_unit"}
            names = [field.name for field in dataclasses.fields(cls)]
            return cls(buckets, **{x: fields[x] for x in names if x not in absent})
        except KeyError as error:
            raise ValueError(f"The plan has no field {error}. {remedy}") from None


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2


def _searchsorted_in_chunks(edges: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    # Converted to int16 chunk by chunk: an int64 result for 10M lengths needs 80 MB.
    index = np.empty(lengths.size, np.int16)
    for start in range(0, lengths.size, 1 << 18):
        part = slice(start, start + (1 << 18))
        index[part] = np.searchsorted(edges, lengths[part])
    return index
