"""`BucketPlan`, a closed set of batch shapes `[B, T]`."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base import assignment
from jaxbucket.base.bucket import Bucket
from jaxbucket.base.checks import (
    MAX_LENGTH,
    check_cost,
    check_lengths,
    check_longest,
    check_positive,
    check_type,
)
from jaxbucket.base.digest import digest
from jaxbucket.base.policies import TRUNCATING, Overlong, checked_overlong
from jaxbucket.base.sizes import (
    Lengths,
    Size,
    Sizes,
    check_same_sequences,
    each_size,
    lengths_matrix,
    sizes_of,
)

# `BucketPlan.assign` returns 16-bit integers.
_MAX_BUCKETS = 2**15 - 1
_JSON_HEADER = {"format": "jaxbucket.BucketPlan", "version": 1}


@dataclasses.dataclass(frozen=True)
class BucketPlan:
    """A closed set of batch shapes, and a policy for examples that are too long.

    Example:
      >>> plan = BucketPlan((Bucket(8, 128), Bucket(2, 512)), max_tokens=1024)
      >>> plan.assign([5, 128, 129, 512])
      array([0, 0, 1, 1], dtype=int16)
      >>> BucketPlan.from_json(plan.to_json()) == plan
      True

    Example: several lengths per example.
      >>> shapes = [(4, {"source": 8, "target": 4}), (2, {"source": 8, "target": 16})]
      >>> plan = BucketPlan.from_shapes(shapes)
      >>> plan.assign({"source": [3, 8], "target": [4, 5]})
      array([0, 1], dtype=int16)

    Attributes:
      buckets: the shapes, by strictly increasing `seq_len`; with several sequences, by
        the sum of their T first.
      max_tokens: the largest allowed B * T, padding counted; with several sequences,
        over all of them, or a mapping from sequence name to a budget for each.
      batch_size_multiple: every B is a multiple of this number.
      seq_len_multiple: every T is a multiple of this number; or a mapping from sequence
        name to the multiple of its T.
      overlong: what happens to an example that no bucket holds: "error" raises
        an error, "drop" leaves the example out, "truncate" shortens it to the last
        bucket, whose first tokens are kept, and "truncate_left" keeps its last tokens.
        With "split", the plan is for the chunks from `split_source`, and
        expects their lengths. With several sequences, a mapping may name a policy for
        each.
      step_costs: the cost of a step of each bucket, used to assign remainders to
        buckets and to predict the cost of an epoch; None counts tokens, B * T.
      cost_unit: the unit of `step_costs`, such as "s".
      packed: whether the shapes were chosen for rows of several examples, as by
        `plan_packing`. Such a plan has to be used with a `Packing`.

    Raises:
      ValueError: if a field is invalid, or a bucket violates one of these constraints.
    """

    buckets: tuple[Bucket, ...]
    max_tokens: Size
    batch_size_multiple: int = 1
    seq_len_multiple: Size = 1  # pyright: ignore
    overlong: Overlong | Mapping[str, Overlong] = "error"
    step_costs: tuple[float, ...] | None = None
    cost_unit: str = "tokens"
    packed: bool = False

    if TYPE_CHECKING:
        # Any mapping is accepted, and stored as `Sizes`.
        def __init__(
            self,
            buckets: Iterable[Bucket],
            max_tokens: int | Mapping[str, int],
            batch_size_multiple: int = 1,
            seq_len_multiple: int | Mapping[str, int] = 1,
            **fields: Any,
        ) -> None: ...

    def __post_init__(self):
        self._set("buckets", tuple(self.buckets))
        multiple = check_positive("batch_size_multiple", self.batch_size_multiple)
        self._set("batch_size_multiple", multiple)
        check_type("packed", self.packed, bool, "Pass True or False.")
        self._check_shapes()
        names, others = self.sequences, "the first bucket has"
        for name in ("max_tokens", "seq_len_multiple"):
            self._set(name, sizes_of(name, getattr(self, name), names, others))
        policy = checked_overlong(self.overlong, names, others)
        self._set("overlong", policy)
        self._check_limits()
        if self.step_costs is None:
            self._set("cost_unit", "tokens")
        else:
            costs = self.step_costs
            if np.shape(costs) != (len(self),):
                raise ValueError(f"`step_costs={costs!r}`: pass one for each bucket.")
            checked = (check_cost(f"step_costs[{i}]", x) for i, x in enumerate(costs))
            self._set("step_costs", tuple(checked))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_shapes(self) -> None:
        """Raises a ValueError unless buckets increase and have the same sequences."""
        buckets, others = self.buckets, "the first bucket has"
        is_few = 0 < len(buckets) <= _MAX_BUCKETS
        if not is_few or not all(isinstance(bucket, Bucket) for bucket in buckets):
            raise ValueError(
                f"`buckets={buckets}`: pass 1 to {_MAX_BUCKETS} of "
                "`Bucket(batch_size, seq_len)`."
            )
        for bucket in buckets:
            check_same_sequences("buckets", bucket.sequences, self.sequences, others)
        pairs = itertools.pairwise(bucket.seq_len for bucket in buckets)
        if not all(before < after for before, after in pairs):
            raise ValueError(
                f"`buckets` has the seq_lens {self.seq_lens.tolist()}. Sort the "
                "buckets by strictly increasing `seq_len`, each of which comes once."
            )

    def _check_limits(self) -> None:
        """Raises a ValueError if a bucket violates a limit of the plan."""
        tokens = self.batch_sizes[:, None] * self.seq_lens
        if not isinstance(self.max_tokens, Sizes):
            tokens = tokens.sum(axis=1, keepdims=True)
        violations = {
            "max_tokens": tokens > each_size(self.max_tokens),
            "batch_size_multiple": self.batch_sizes % self.batch_size_multiple > 0,
            "seq_len_multiple": self.seq_lens % each_size(self.seq_len_multiple) > 0,
        }
        for name, violated in violations.items():
            if violated.any():
                bucket = self.buckets[int(np.argwhere(violated)[0, 0])]
                raise ValueError(
                    f"Bucket {bucket}, with {bucket.num_tokens} tokens, does not fit "
                    f"`{name}={getattr(self, name)!r}`. Change one of the two."
                )
        # Truncation limits each sequence by itself.
        last = self.buckets[-1].seq_len
        truncates = np.isin(self.policies, TRUNCATING).any()
        if truncates and self.sequences and last != self.max_seq_lens:
            raise ValueError(
                f"`overlong={self.overlong!r}` requires a last bucket that holds the "
                f"longest sequences, {self.max_seq_lens!r}, but it has {last!r}. Add "
                "such a bucket, or choose 'error' or 'drop'."
            )

    @classmethod
    def from_shapes(
        cls,
        shapes: Iterable[tuple[int, int | Mapping[str, int]]],
        *,
        max_tokens: int | Mapping[str, int] | None = None,
        **fields: Any,
    ) -> BucketPlan:
        """Returns a plan with the given shapes.

        Example:
          >>> plan = BucketPlan.from_shapes([(16, 256), (8, 512), (32, 128)])
          >>> plan.boundaries, plan.max_tokens
          (array([128, 256, 512]), 4096)

        Args:
          shapes: pairs (B, T), in any order. T is a mapping from sequence name to T if
            examples have several sequences.
          max_tokens: the maximum B * T; by default the B * T of the largest shape.
          **fields: the other attributes of the plan.

        Raises:
          ValueError: if a shape is not a pair of positive integers, or violates a
            constraint of the plan.
        """
        buckets = [Bucket(batch_size, seq_len) for batch_size, seq_len in shapes]
        buckets.sort(key=lambda bucket: (bucket.tokens_per_row, bucket.seq_lens))
        if max_tokens is None:
            max_tokens = max((bucket.num_tokens for bucket in buckets), default=1)
        return cls(buckets, max_tokens, **fields)

    def __len__(self) -> int:
        return len(self.buckets)

    @functools.cached_property
    def sequences(self) -> tuple[str, ...]:
        """The names of the sequences of an example; empty if it has one length."""
        return self.buckets[0].sequences

    @functools.cached_property
    def tokens_per_row(self) -> np.ndarray:
        """`[K]` int64: T of each bucket, or the sum of the T of its sequences."""
        return np.array([bucket.tokens_per_row for bucket in self.buckets], np.int64)

    @functools.cached_property
    def seq_lens(self) -> np.ndarray:
        """`[K, Q]` int64: T of each sequence in each bucket, or `[K, 1]`."""
        return np.array([bucket.seq_lens for bucket in self.buckets], np.int64)

    @property
    def boundaries(self) -> np.ndarray:
        """`[K]` int64: the longest length of each bucket, inclusive.

        Raises:
          ValueError: if examples have several sequences.
        """
        if self.sequences:
            raise ValueError(
                f"The buckets have a T for each of the sequences "
                f"{list(self.sequences)}, but this requires examples with one length. "
                "Use `plan.seq_lens`, or plan with one length for each example."
            )
        return self.tokens_per_row

    @functools.cached_property
    def batch_sizes(self) -> np.ndarray:
        """`[K]` int64: B of each bucket."""
        return np.array([bucket.batch_size for bucket in self.buckets], np.int64)

    @functools.cached_property
    def costs(self) -> np.ndarray:
        """`[K]`: the cost of a step of each bucket in `cost_unit`; B * T by default."""
        if self.step_costs is None:
            return self.batch_sizes * self.tokens_per_row
        return np.array(self.step_costs)

    @functools.cached_property
    def row_costs(self) -> np.ndarray:
        """`[K]`: the cost of a row of each bucket."""
        return self.costs / self.batch_sizes

    @property
    def largest_batch(self) -> int:
        """The largest B * T."""
        return max(bucket.num_tokens for bucket in self.buckets)

    @property
    def filler(self) -> int:
        """The cheapest bucket, whose empty batches complete a step; its index."""
        return int(self.costs.argmin())

    @property
    def unpacked(self) -> BucketPlan:
        """The same shapes for rows of one example, or for lengths of packed rows."""
        return dataclasses.replace(self, packed=False)

    @property
    def max_seq_len(self) -> int:
        """T of the last bucket.

        Raises:
          ValueError: if examples have several sequences.
        """
        return int(self.boundaries[-1])

    @functools.cached_property
    def max_seq_lens(self) -> Sizes:
        """The largest T of each of several sequences."""
        longest = self.seq_lens.max(axis=0).tolist()
        return Sizes(dict(zip(self.sequences, longest, strict=True)))

    @functools.cached_property
    def policies(self) -> np.ndarray:
        """`[Q]`: the policy for each sequence that is too long."""
        policies = self.overlong
        if isinstance(policies, Mapping):
            return np.array([policies[name] for name in self.sequences])
        return np.full(self.seq_lens.shape[1], policies)

    def check(self, lengths: Lengths) -> np.ndarray:
        """Returns `lengths` as an integer array, after checking them.

        Args:
          lengths: `[N]` integers, one per example; with `overlong="split"`, one per
            chunk. With several sequences, a mapping from sequence name to `[N]`.

        Returns:
          `[N]`, the same array if it has one of numpy's integer dtypes; or `[N, Q]`
          with a column for each of several sequences.

        Raises:
          ValueError: if the lengths are not positive integers, or if no bucket holds
            one and `overlong` is "error" or "split".
        """
        if self.sequences:
            columns = lengths_matrix(lengths, self.sequences)
            self._assign_several(columns)
            return columns
        lengths = check_lengths(cast(ArrayLike, lengths), keep=True)
        if self.overlong in ("error", "split"):
            check_longest(lengths, self.max_seq_len, is_split=self.overlong == "split")
        return lengths

    def assign(self, lengths: Lengths) -> np.ndarray:
        """Returns the bucket of each example.

        This is the shortest bucket that it fits in. With several sequences, it is the
        bucket with the cheapest row, that is, with the smallest cost by B.

        Args:
          lengths: as for `check`.

        Returns:
          `[N]` int16, an index into `buckets`, or -1 for an example that
          `overlong="drop"` leaves out.

        Raises:
          ValueError: if `check` raises it.
        """
        if self.sequences:
            return self._assign_several(lengths_matrix(lengths, self.sequences))
        lengths = self.check(lengths)
        index = assignment.shortest(lengths, self.boundaries)
        over = index == len(self)
        if self.overlong in TRUNCATING:
            index[over] = len(self) - 1
        elif self.overlong == "drop":
            index[over] = -1
        return index

    def _assign_several(self, lengths: np.ndarray) -> np.ndarray:
        """Returns the bucket of each example, `[N]` int16, from `[N, Q]` lengths."""
        is_over = lengths > self.seq_lens.max(axis=0)
        is_used = ~is_over[:, self.policies == "drop"].any(axis=1)
        for q in np.flatnonzero(self.policies == "error").tolist():
            name, used = self.sequences[q], lengths[:, q] * is_used
            check_longest(used, self.max_seq_lens[name], name)
        kept = self.truncated(lengths)
        index = assignment.cheapest(kept, self.seq_lens, self.row_costs)
        index[~is_used] = -1
        is_unheld = (index < 0) & is_used
        if is_unheld.any() and "drop" not in self.policies:
            example = int(np.argmax(is_unheld))
            raise ValueError(
                f"`lengths` of example {example} are {lengths[example].tolist()}, of "
                f"{list(self.sequences)}. No bucket holds these together. Plan "
                "with a larger `max_seq_len`, or choose `overlong='drop'`."
            )
        return index

    @property
    def truncates(self) -> bool | list[str]:
        """Whether examples keep their first tokens; or which of their sequences do."""
        return self._with_policy("truncate")

    @property
    def truncates_left(self) -> bool | list[str]:
        """Whether examples keep their last tokens; or which of their sequences do."""
        return self._with_policy("truncate_left")

    def _with_policy(self, policy: Overlong) -> bool | list[str]:
        if not self.sequences:
            return self.overlong == policy
        return np.array(self.sequences)[self.policies == policy].tolist()

    def truncated(self, lengths: np.ndarray) -> np.ndarray:
        """Returns the lengths after "truncate" or "truncate_left" shortened examples.

        Args:
          lengths: `[N]` or `[N, Q]` integers, from `check`.
        """
        is_cut = np.isin(self.policies, TRUNCATING)
        limits = np.where(is_cut, self.seq_lens.max(axis=0), MAX_LENGTH)
        most = min(MAX_LENGTH, np.iinfo(lengths.dtype).max)
        limits = np.minimum(limits, most).astype(lengths.dtype)
        return np.minimum(lengths, limits)

    def kept_lengths(self, lengths: Lengths) -> np.ndarray:
        """Returns the lengths of the examples in batches, `[n]` or `[n, Q]`.

        Examples that the plan leaves out are missing, and "truncate" and
        "truncate_left" limit the length to the last bucket.

        Args:
          lengths: as for `check`.

        Raises:
          ValueError: if `assign` raises it.
        """
        lengths = self.check(lengths)
        if len(lengths) and (lengths.max(axis=0) <= self.seq_lens[-1]).all():
            # Usual, and much quicker than finding the bucket of each.
            return self.truncated(lengths)
        return self.truncated(lengths[self.assign(lengths) >= 0])

    @functools.cached_property
    def fingerprint(self) -> str:
        """32 hex digits that identify the plan: a hash of its JSON."""
        return digest(self.to_json().encode())

    def to_json(self) -> str:
        """Returns the plan as a JSON object; `from_json` is the inverse."""
        fields = {x.name: getattr(self, x.name) for x in dataclasses.fields(self)}
        fields["buckets"] = [bucket.to_list() for bucket in self.buckets]
        return json.dumps({**_JSON_HEADER, **fields}, default=dict)

    @classmethod
    def from_json(cls, text: str) -> BucketPlan:
        """Returns the plan that `to_json` wrote.

        Args:
          text: the JSON object. A field "notes", for anything of your own, is ignored.

        Raises:
          ValueError: if `text` is not valid JSON, does not hold a plan or holds one of
            an unknown version or with unknown fields, or if the plan is invalid.
        """
        fields = json.loads(text)
        if not isinstance(fields, dict) or not fields.items() >= _JSON_HEADER.items():
            raise ValueError(
                f"The JSON is no plan with {_JSON_HEADER}. Write it again with "
                "`plan.to_json()`."
            )
        fields = {x: fields[x] for x in fields.keys() - {*_JSON_HEADER, "notes"}}
        wrong = fields.keys() ^ {field.name for field in dataclasses.fields(cls)}
        pairs = fields.pop("buckets", None)
        is_list = isinstance(pairs, list) and all(isinstance(x, list) for x in pairs)
        if wrong or not is_list or any(len(pair) != 2 for pair in pairs):
            raise ValueError(
                f"The plan has missing or unknown fields, {sorted(wrong)}, or "
                "`buckets` that are no list of [B, T]. Anything else goes into 'notes'."
            )
        return cls([Bucket(*pair) for pair in pairs], **fields)
