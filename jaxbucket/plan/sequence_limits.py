"""Limits on the shapes of a plan for examples with several sequences."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

from jaxbucket.base.bucket import Bucket
from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import (
    MAX_LENGTH,
    check_accumulate,
    check_choice,
    check_cost,
    check_function,
    check_positive,
    overlong_message,
)
from jaxbucket.base.policies import OVERLONG_SEVERAL, TRUNCATING, Overlong
from jaxbucket.base.sizes import (
    PerSequence,
    Sizes,
    check_same_sequences,
    check_sequence_names,
    checked_size,
)
from jaxbucket.plan.costs import unit_of
from jaxbucket.plan.flow.step_sizes import StepSizes
from jaxbucket.plan.limits import call_user_function, check_batch_size_limits

# (B, mapping from sequence name to T) -> the cost of a step.
SequenceCostFn: TypeAlias = Callable[[int, Mapping[str, int]], float]
SequenceBudget: TypeAlias = int | Mapping[str, int] | Callable[[Mapping[str, int]], int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceLimits:
    """Limits on every shape of a plan for several sequences, and the cost of a step.

    These are the options of `plan_buckets`, collected for functions such as
    `plan_curve`.

    Example: the largest B for two T of source and target.
      >>> limits = SequenceLimits(
      ...     sequences=("source", "target"), max_tokens=1024, batch_size_multiple=4
      ... )
      >>> limits.batch_sizes(np.array([[64, 32], [100, 100]]))
      array([8, 4])

    Attributes:
      sequences: the names of the sequences; stored in alphabetical order.
      max_tokens: the largest B * T, padding counted: the sum over all sequences, a
        budget for each, or a function from `Sizes`, the T of each, to the sum.
      batch_size_multiple: every B is a multiple of this number.
      seq_len_multiple: every T is a multiple of this number, or of the one of its
        sequence.
      max_seq_len: the T of the last bucket, one for all sequences or for each. None
        for the longest lengths, rounded up; then a bucket with all of them is only
        required to truncate.
      min_batch_size: the smallest number of rows in a batch.
      max_batch_size: the largest number of rows in a batch; None for no limit.
      overlong: what happens to examples with a longer sequence: "error", "drop",
        "truncate" or "truncate_left"; or a mapping from sequence name to one of these.
      cost_fn: `(batch_size, seq_lens)` -> the cost of a step; None counts tokens.
      accumulate: the number of micro-batches per step, all of the same bucket.
      sample: whether the lengths are a sample of more examples, such as of a stream.
        Then every B is the largest within the limits, even if the sample fills none.

    Raises:
      ValueError: if a value is out of range, the names of a mapping are not those of
        `sequences`, or a `max_seq_len` is not a multiple of its `seq_len_multiple`.
    """

    sequences: tuple[str, ...]
    max_tokens: SequenceBudget
    batch_size_multiple: int = 1
    seq_len_multiple: int | Mapping[str, int] = 1
    max_seq_len: int | Mapping[str, int] | None = None
    min_batch_size: int = 1
    max_batch_size: int | None = None
    overlong: Overlong | Mapping[str, Overlong] = "error"
    cost_fn: SequenceCostFn | None = None
    accumulate: int = 1
    sample: bool = False

    def __post_init__(self):
        names = self.sequences
        if isinstance(names, str):
            names = [names]
        check_sequence_names("sequences", dict.fromkeys(names))
        self._set("sequences", tuple(sorted(set(names))))
        self._set("accumulate", check_accumulate(self.accumulate))
        for name in ("batch_size_multiple", "min_batch_size"):
            self._set(name, check_positive(name, getattr(self, name)))
        if self.max_batch_size is not None:
            size = check_positive("max_batch_size", self.max_batch_size)
            self._set("max_batch_size", size)
        check_batch_size_limits(self)
        for name in ("max_tokens", "seq_len_multiple", "max_seq_len"):
            value = getattr(self, name)
            is_default = name == "max_seq_len" and value is None
            if not (is_default or callable(value)):
                self._set(name, self._checked(name, value))
        self._check_overlong()
        multiples, last = self.multiples, self._each(self.max_seq_len)
        for name, multiple in zip(self.sequences, multiples.tolist(), strict=True):
            if last is not None and last[name] % multiple:
                raise ValueError(
                    f"`max_seq_len={last[name]}` of {name!r} is not a multiple of "
                    f"`seq_len_multiple={multiple}`. Use "
                    f"{-(-last[name] // multiple) * multiple}."
                )
        if self.cost_fn is not None:
            check_function("cost_fn", self.cost_fn, "(batch_size, seq_lens)")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _checked(self, name: str, value: Any) -> int | Sizes:
        if isinstance(value, Mapping):
            self._check_names(name, value)
        return checked_size(name, value)

    def _check_names(self, argument: str, values: Mapping[str, Any]) -> None:
        check_same_sequences(argument, values, self.sequences, "the lengths have")

    def _check_overlong(self) -> None:
        policies = self.overlong
        if isinstance(policies, Mapping):
            self._check_names("overlong", policies)
            self._set("overlong", PerSequence(policies, "overlong"))
        else:
            policies = {"": policies}
        for name, policy in policies.items():
            argument = f"overlong[{name!r}]" if name else "overlong"
            check_choice(argument, policy, OVERLONG_SEVERAL)

    def _each(self, value: Any) -> dict[str, Any] | None:
        """Returns the value of each sequence; None for None."""
        if value is None:
            return None
        if isinstance(value, Mapping):
            return {name: value[name] for name in self.sequences}
        return dict.fromkeys(self.sequences, value)

    @property
    def multiples(self) -> np.ndarray:
        """`[Q]` int64: the multiple of each T."""
        return np.array(list((self._each(self.seq_len_multiple) or {}).values()))

    @property
    def must_hold_all(self) -> bool:
        """Whether one bucket must hold the longest sequences together.

        It is the bucket of `max_seq_len`. Truncation also requires one, because it
        limits each sequence by itself.
        """
        return self.max_seq_len is not None or self.truncates

    @property
    def truncates(self) -> bool:
        """Whether a sequence is truncated."""
        policies = self._each(self.overlong) or {}
        return any(policy in TRUNCATING for policy in policies.values())

    def max_seq_lens(self, lengths: np.ndarray) -> np.ndarray:
        """Returns the longest T of each sequence, `[Q]` int64.

        Args:
          lengths: `[N, Q]` integers, one row per example.
        """
        last = self._each(self.max_seq_len)
        if last is not None:
            return np.array(list(last.values()), np.int64)
        return self.rounded(lengths.max(axis=0))

    def rounded(self, lengths: np.ndarray) -> np.ndarray:
        """Returns lengths rounded up to possible T, `[..., Q]` int64."""
        multiples = self.multiples
        return -(-lengths.astype(np.int64) // multiples) * multiples

    def planned_lengths(self, lengths: np.ndarray) -> np.ndarray:
        """Returns the lengths of the examples to plan for, `[n, Q]`.

        Args:
          lengths: `[N, Q]` integers, one row per example.

        Raises:
          ValueError: if a sequence is too long and its policy is "error", or no
            example is left.
        """
        longest = np.minimum(self.max_seq_lens(lengths), MAX_LENGTH)
        policies = np.array(list((self._each(self.overlong) or {}).values()))
        is_over = lengths > longest
        is_dropped = is_over[:, policies == "drop"].any(axis=1)
        if is_dropped.all():
            raise ValueError(
                f"Every example has a sequence longer than `max_seq_len="
                f"{self.max_seq_len!r}`, and `overlong='drop'` leaves all of them out. "
                "Raise `max_seq_len`."
            )
        for q in np.flatnonzero(policies == "error").tolist():
            if (is_over[:, q] & ~is_dropped).any():
                used, name = lengths[:, q] * ~is_dropped, self.sequences[q]
                raise ValueError(overlong_message(used, int(longest[q]), name))
        return np.minimum(lengths[~is_dropped], longest.astype(lengths.dtype))

    def batch_sizes(self, seq_lens: np.ndarray) -> np.ndarray:
        """Returns the largest B for each shape, `[n]` int64; 0 if no row fits.

        Args:
          seq_lens: `[n, Q]` int64, the T of each sequence.
        """
        rows = self._most_rows(seq_lens)
        if self.max_batch_size is not None:
            rows = np.minimum(rows, self.max_batch_size)
        rows = rows // self.batch_size_multiple * self.batch_size_multiple
        return np.where(rows < self.min_batch_size, 0, rows)

    def _most_rows(self, seq_lens: np.ndarray) -> np.ndarray:
        budget = self.max_tokens
        if isinstance(budget, Mapping):
            budgets = np.array([budget[name] for name in self.sequences])
            return (budgets // seq_lens).min(axis=1)
        totals = seq_lens.sum(axis=1)
        if not callable(budget):
            return budget // totals
        budgets = [
            check_positive(
                f"max_tokens({sizes!r})",
                call_user_function("max_tokens", budget, sizes),
            )
            for sizes in self._sizes(seq_lens)
        ]
        return np.array(budgets) // totals

    def _sizes(self, seq_lens: np.ndarray) -> Iterator[Sizes]:
        """Yields the T of each shape by sequence name."""
        for row in seq_lens.tolist():
            yield Sizes(dict(zip(self.sequences, row, strict=True)))

    def costs(self, batch_sizes: np.ndarray, seq_lens: np.ndarray) -> np.ndarray:
        """Returns the cost of a step of each shape, `[n]`.

        Args:
          batch_sizes: `[n]` integers, the B.
          seq_lens: `[n, Q]` int64, the T of each sequence.

        Returns:
          The tokens as int64 without a `cost_fn`, float64 costs with one.

        Raises:
          ValueError: if `cost_fn` raises an exception, or returns a cost that is not
            positive.
        """
        if self.cost_fn is None:
            return batch_sizes * seq_lens.sum(axis=1)
        pairs = zip(batch_sizes.tolist(), self._sizes(seq_lens), strict=True)
        costs = [
            check_cost(
                f"cost_fn({size}, {sizes!r})",
                call_user_function("cost_fn", self.cost_fn, size, sizes),
            )
            for size, sizes in pairs
        ]
        return np.array(costs, np.float64)

    def sizes(self, seq_lens: np.ndarray, examples: int) -> StepSizes:
        """Returns the possible numbers of rows of a step of each shape.

        Args:
          seq_lens: `[n, Q]` int64, the T of each sequence, all of them allowed.
          examples: the number of examples.
        """
        batch_sizes = self.batch_sizes(seq_lens)
        return StepSizes.of(
            batch_sizes,
            lambda shape, rows: self.costs(rows, seq_lens[shape]),
            np.full_like(batch_sizes, examples),
            *(self.batch_size_multiple, self.min_batch_size, self.accumulate),
            sample=self.sample,
            is_linear=self.cost_fn is None,
        )

    def check_shapes(self, seq_lens: np.ndarray) -> np.ndarray:
        """Returns the largest B for each shape, `[n]` int64.

        Args:
          seq_lens: `[n, Q]` int64, the T of each sequence.

        Raises:
          ValueError: if the budget does not hold the fewest rows of a shape.
        """
        batch_sizes = self.batch_sizes(seq_lens)
        if batch_sizes.all():
            return batch_sizes
        bad = int(np.argmin(batch_sizes))
        shape = list(self._sizes(seq_lens))[bad]
        multiple = self.batch_size_multiple
        least = -(-self.min_batch_size // multiple) * multiple
        budget, remedy = self.max_tokens, "Raise `max_tokens`"
        if isinstance(budget, int):
            remedy += f" to {least * int(seq_lens.sum(axis=1).max())}"
        elif isinstance(budget, Sizes):
            pairs = zip(self.sequences, seq_lens.max(axis=0).tolist(), strict=True)
            most = {name: max(budget[name], least * t) for name, t in pairs}
            remedy = f"Pass `max_tokens={most}`"
        lower = "`max_seq_len`"
        if least > 1:
            name = "min_batch_size" if least > multiple else "batch_size_multiple"
            lower = f"`{name}={getattr(self, name)}` or {lower}"
        raise ValueError(
            f"`max_tokens={budget!r}` does not hold {least} "
            f"{'row' if least == 1 else 'rows'} of `seq_len={shape!r}`. "
            f"{remedy}, or lower {lower}."
        )

    def plan(
        self, seq_lens: np.ndarray, batch_sizes: np.ndarray | None = None
    ) -> BucketPlan:
        """Returns the plan whose buckets have the given T.

        Args:
          seq_lens: `[K, Q]` integers, the T of each sequence.
          batch_sizes: `[K]` integers, the B; None for the largest.

        Raises:
          ValueError: if a bucket cannot hold a single row.
        """
        most = self.check_shapes(seq_lens)
        batch_sizes = most if batch_sizes is None else batch_sizes
        shapes = list(self._sizes(seq_lens))
        buckets = sorted(
            (Bucket(b, t) for b, t in zip(batch_sizes.tolist(), shapes, strict=True)),
            key=lambda bucket: bucket.seq_len,
        )
        budget = self.max_tokens
        if callable(budget):
            budget = max(bucket.num_tokens for bucket in buckets)
        plan = BucketPlan(
            tuple(buckets),
            max_tokens=checked_size("max_tokens", budget),
            batch_size_multiple=self.batch_size_multiple,
            seq_len_multiple=checked_size("seq_len_multiple", self.seq_len_multiple),
            overlong=self.overlong,
        )
        if self.cost_fn is None:
            return plan
        costs = self.costs(plan.batch_sizes, plan.seq_lens)
        return dataclasses.replace(
            plan, step_costs=tuple(costs.tolist()), cost_unit=unit_of(self.cost_fn)
        )
