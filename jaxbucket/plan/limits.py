"""Limits on the shapes of a plan, and the largest batch size that they allow."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from jaxbucket.base.bucket import Bucket
from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import (
    check_accumulate,
    check_choice,
    check_cost,
    check_countable,
    check_function,
    check_positive,
    overlong_message,
)
from jaxbucket.base.policies import OVERLONG, Overlong
from jaxbucket.plan.boundary_rules import Candidates
from jaxbucket.plan.costs import CostFn, StepTime, TokenCost, TransformerCost, unit_of
from jaxbucket.plan.flow.batch_sizes import fitted
from jaxbucket.plan.flow.step_sizes import StepSizes
from jaxbucket.plan.histogram import cumulative

# With more possible T, only the rounded-up lengths of examples are candidates. Other T
# could save a little, in the last batch of a bucket, so the plan is not proven optimal.
_MAX_CANDIDATES = 1 << 18

Budget: TypeAlias = int | Callable[[int], int] | Sequence[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on every shape (B, T), and the cost of a step.

    These are the options of `plan_buckets`, collected for functions such as
    `plan_curve`.

    Example: the largest B for several T, and a plan with these shapes.
      >>> limits = Limits(max_tokens=4096, batch_size_multiple=8, seq_len_multiple=64)
      >>> limits.batch_sizes([128, 320, 512])
      array([32,  8,  8])
      >>> [str(bucket) for bucket in limits.plan([128, 320, 512]).buckets]
      ['[32, 128]', '[8, 320]', '[8, 512]']

    Attributes:
      max_tokens: the largest B * T, padding counted: an integer, a function of T, or
        one integer for each boundary if the boundaries are given.
      batch_size_multiple: every B is a multiple of this number.
      seq_len_multiple: every T is a multiple of this number.
      max_seq_len: T of the last bucket; None for the longest length, rounded up.
      min_batch_size: the smallest number of rows in a batch.
      max_batch_size: the largest number of rows in a batch, even if more would fit in
        the budget; None for no limit.
      overlong: what happens to examples longer than the last bucket: "error", "drop",
        "truncate", "truncate_left" (the last tokens are kept) or "split" (into chunks,
        by `split_source`).
      cost_fn: `(batch_size, seq_len)` -> the cost of a step; None counts tokens.
      accumulate: the number of micro-batches per step, all of the same bucket.
      sample: whether the lengths are a sample of more examples, such as of a stream.
        Then every B is the largest within the limits, even if the sample fills none.

    Raises:
      ValueError: if a value is out of range, `max_seq_len` is not a multiple of
        `seq_len_multiple`, or no B satisfies the limits on the batch size.
    """

    max_tokens: Budget
    batch_size_multiple: int = 1
    seq_len_multiple: int = 1
    max_seq_len: int | None = None
    min_batch_size: int = 1
    max_batch_size: int | None = None
    overlong: Overlong = "error"
    cost_fn: CostFn | None = None
    accumulate: int = 1
    sample: bool = False

    def __post_init__(self):
        check_choice("overlong", self.overlong, OVERLONG)
        self._set("accumulate", check_accumulate(self.accumulate))
        for name in ("batch_size_multiple", "seq_len_multiple", "min_batch_size"):
            self._set(name, check_positive(name, getattr(self, name)))
        for name in ("max_batch_size", "max_seq_len"):
            if getattr(self, name) is not None:
                self._set(name, check_positive(name, getattr(self, name)))
        budget = self.max_tokens
        if isinstance(budget, Sequence) and not isinstance(budget, str):
            budget = tuple(check_positive("max_tokens", x) for x in budget)
        elif not callable(budget):
            budget = check_positive("max_tokens", budget)
        self._set("max_tokens", budget)
        check_batch_size_limits(self)
        multiple, last = self.seq_len_multiple, self.max_seq_len
        if last is not None and last % multiple:
            raise ValueError(
                f"`max_seq_len={last}` is not a multiple of `seq_len_multiple="
                f"{multiple}`. Use {-(-last // multiple) * multiple}."
            )
        if self.cost_fn is not None:
            check_function("cost_fn", self.cost_fn, "(batch_size, seq_len)")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def longest(self, lengths: np.ndarray) -> int:
        """Returns T of the last bucket.

        Args:
          lengths: `[N]` integers, one per example.

        Raises:
          ValueError: if a length exceeds `max_seq_len` and `overlong` is "error".
        """
        last = self.max_seq_len
        if last is None:
            multiple = self.seq_len_multiple
            return -(-int(lengths.max()) // multiple) * multiple
        if self.overlong == "error" and lengths.max() > last:
            raise ValueError(overlong_message(lengths, last))
        return last

    def candidates(self, lengths: np.ndarray) -> Candidates:
        """Returns every T at which a bucket may end, with its examples, rows and cost.

        Args:
          lengths: `[N]` integers, one per example.

        Raises:
          ValueError: if no row of the last bucket fits in `max_tokens`, or if
            `max_tokens` is a sequence, whose budgets belong to given boundaries.
        """
        if isinstance(self.max_tokens, tuple):
            raise ValueError(
                f"`max_tokens` has {len(self.max_tokens)} budgets, one for each "
                f"bucket, which requires {len(self.max_tokens)} `boundaries`. Pass "
                "them, or pass `max_tokens` as one integer, without commas, or as a "
                "function of T."
            )
        last = self.longest(lengths)
        self._check_rows([last], self.batch_sizes([last]), int(lengths.max()))
        ends, examples, tokens = cumulative(
            lengths, last, self.seq_len_multiple, self.overlong
        )
        # If `last` is very large, `cumulative` returns only lengths that are needed.
        complete = len(ends) == last // self.seq_len_multiple <= _MAX_CANDIDATES
        if not complete:
            needed = np.append(np.diff(examples, prepend=0)[:-1] > 0, True)
            ends, examples, tokens = ends[needed], examples[needed], tokens[needed]
        batch_sizes = self.batch_sizes(ends)
        # A budget that grows with T may be too small for any short row.
        fit = np.flatnonzero(batch_sizes)
        ends, examples = ends[fit], examples[fit]
        self._check_step(batch_sizes[fit], ends)
        sizes = self._sizes(ends, batch_sizes[fit], examples)
        return Candidates(ends, examples, tokens[fit], sizes, complete)

    def _sizes(
        self, seq_lens: np.ndarray, batch_sizes: np.ndarray, examples: np.ndarray
    ) -> StepSizes:
        """Returns the possible numbers of rows of a step of each T."""
        return StepSizes.of(
            batch_sizes,
            lambda shape, rows: self.costs(rows, seq_lens[shape]),
            examples,
            *(self.batch_size_multiple, self.min_batch_size, self.accumulate),
            sample=self.sample,
            is_linear=isinstance(
                self.cost_fn, TokenCost | TransformerCost | StepTime | None
            ),
        )

    def _check_step(self, batch_sizes: np.ndarray, seq_lens: np.ndarray) -> None:
        """Raises a ValueError if the tokens of a step do not fit in 64 bits."""
        check_countable(
            int((batch_sizes * seq_lens).max()) * self.accumulate,
            "The number of tokens per step, from `max_tokens` and "
            f"`accumulate={self.accumulate}`,",
            "Lower one of the two.",
        )

    def batch_sizes(self, seq_lens: Sequence[int] | np.ndarray) -> np.ndarray:
        """Returns the largest B for each T, `[n]` int64; 0 if no row fits.

        Args:
          seq_lens: `[n]` integers, the T.
        """
        seq_lens = np.asarray(seq_lens, np.int64)
        rows = self.budgets(seq_lens) // seq_lens
        if self.max_batch_size is not None:
            rows = np.minimum(rows, self.max_batch_size)
        rows = rows // self.batch_size_multiple * self.batch_size_multiple
        return np.where(rows < self.min_batch_size, 0, rows)

    def budgets(self, seq_lens: np.ndarray) -> np.ndarray:
        """Returns the largest B * T for each T, `[n]` int64.

        Args:
          seq_lens: `[n]` int64, the T.
        """
        budget = self.max_tokens
        if isinstance(budget, tuple):
            return np.array(budget, np.int64)
        if not callable(budget):
            return np.full(len(seq_lens), budget, np.int64)
        budgets = (
            (t, call_user_function("max_tokens", budget, t)) for t in seq_lens.tolist()
        )
        return np.array([check_positive(f"max_tokens({t})", x) for t, x in budgets])

    def costs(self, batch_sizes: np.ndarray, seq_lens: np.ndarray) -> np.ndarray:
        """Returns the cost of a step of each shape, `[n]`.

        Args:
          batch_sizes: `[n]` integers, the B.
          seq_lens: `[n]` integers, the T.

        Returns:
          The tokens as int64 without a `cost_fn`, float64 costs with one.
        """
        if self.cost_fn is None:
            return batch_sizes * seq_lens
        return _costs(self.cost_fn, batch_sizes, seq_lens)

    def plan(
        self,
        seq_lens: Sequence[int] | np.ndarray,
        counts: Sequence[int] | np.ndarray | None = None,
    ) -> BucketPlan:
        """Returns the plan whose buckets have the given T.

        Args:
          seq_lens: `[K]` increasing integers, the boundaries.
          counts: `[K]` integers, the number of examples of each bucket, for which each
            B is chosen; None for the largest B.

        Raises:
          ValueError: if a bucket cannot hold a single row, or if `max_tokens` is a
            sequence of a different size.
        """
        seq_lens = np.asarray(seq_lens, np.int64)
        if isinstance(self.max_tokens, tuple) and len(self.max_tokens) != len(seq_lens):
            raise ValueError(
                f"`max_tokens` has {len(self.max_tokens)} budgets for "
                f"{len(seq_lens)} boundaries. Pass one for each boundary."
            )
        batch_sizes = self.batch_sizes(seq_lens)
        self._check_rows(seq_lens, batch_sizes)
        budget = self.max_tokens
        if not isinstance(budget, int):
            budget = int(self.budgets(seq_lens).max())
        if counts is not None:
            counts = np.asarray(counts, np.int64)
            sizes = self._sizes(seq_lens, batch_sizes, np.cumsum(counts))
            batch_sizes = fitted(sizes, counts).rows // self.accumulate
        plan = BucketPlan(
            tuple(map(Bucket, batch_sizes.tolist(), seq_lens.tolist())),
            max_tokens=budget,
            batch_size_multiple=self.batch_size_multiple,
            seq_len_multiple=self.seq_len_multiple,
            overlong=self.overlong,
        )
        return costed(plan, self.cost_fn)

    def _check_rows(
        self,
        seq_lens: Sequence[int] | np.ndarray,
        batch_sizes: np.ndarray,
        longest: int | None = None,
    ) -> None:
        """Raises a ValueError if a bucket cannot hold a single row.

        Args:
          seq_lens: `[n]` integers, the T.
          batch_sizes: `[n]` integers, the B.
          longest: the longest length if the last T is derived from it, for the message.
        """
        if batch_sizes.all():
            return
        bucket = int(np.argmin(batch_sizes))
        seq_len = int(seq_lens[bucket])
        budget = int(self.budgets(np.asarray(seq_lens, np.int64))[bucket])
        multiple = self.batch_size_multiple
        least = -(-self.min_batch_size // multiple) * multiple
        name = "min_batch_size" if least > multiple else "batch_size_multiple"
        lower = f"`{name}` or `max_seq_len`" if least > 1 else "`max_seq_len`"
        rows = budget // seq_len
        raise ValueError(
            f"`max_tokens={budget}` holds {rows} {'row' if rows == 1 else 'rows'} of "
            f"`seq_len={seq_len}`{self._origin(seq_len, longest)}, fewer than "
            f"`{name}={getattr(self, name)}`. Raise `max_tokens` to {seq_len * least}, "
            f"or lower {lower}."
        )

    def _origin(self, seq_len: int, longest: int | None) -> str:
        """Returns why T of the last bucket exceeds the longest length, in brackets."""
        if longest is None or self.max_seq_len is not None or longest == seq_len:
            return ""
        return (
            f" (the longest length, {longest}, rounded up to a multiple of "
            f"{self.seq_len_multiple})"
        )


def check_limits(limits: Any) -> None:
    """Raises a ValueError for anything but `Limits`, such as limits of sequences."""
    if not isinstance(limits, Limits):
        raise ValueError(
            f"`limits` is a {type(limits).__name__}. Pass `Limits`, for examples with "
            "one length."
        )


class BatchSizeLimits(Protocol):
    """The limits on B that `Limits` and `SequenceLimits` share."""

    @property
    def batch_size_multiple(self) -> int: ...
    @property
    def min_batch_size(self) -> int: ...
    @property
    def max_batch_size(self) -> int | None: ...


def check_batch_size_limits(limits: BatchSizeLimits) -> None:
    """Raises a ValueError if no B satisfies the limits."""
    most, multiple = limits.max_batch_size, limits.batch_size_multiple
    if most is None:
        return
    if most < multiple:
        raise ValueError(
            f"`max_batch_size={most}` is less than `batch_size_multiple="
            f"{multiple}`. Raise `max_batch_size` to {multiple}."
        )
    if most // multiple * multiple < limits.min_batch_size:
        raise ValueError(
            f"`batch_size_multiple={multiple}` has no multiple from "
            f"`min_batch_size={limits.min_batch_size}` to `max_batch_size={most}`. "
            f"Lower `min_batch_size` to {most // multiple * multiple}."
        )


def costed(plan: BucketPlan, cost_fn: CostFn | None) -> BucketPlan:
    """Returns a plan with the same shapes and new step costs.

    Args:
      plan: the plan.
      cost_fn: `(batch_size, seq_len)` -> the cost of a step; None counts tokens.

    Raises:
      ValueError: if `cost_fn` raises an exception or returns a cost that is not
        positive.
    """
    if cost_fn is None:
        return dataclasses.replace(plan, step_costs=None, cost_unit="tokens")
    return dataclasses.replace(
        plan,
        step_costs=tuple(_costs(cost_fn, plan.batch_sizes, plan.boundaries).tolist()),
        cost_unit=unit_of(cost_fn),
    )


def _costs(
    cost_fn: CostFn, batch_sizes: np.ndarray, seq_lens: np.ndarray
) -> np.ndarray:
    """Returns the cost of a step of each shape, `[n]` float64."""
    shapes = zip(batch_sizes.tolist(), seq_lens.tolist(), strict=True)
    costs = (
        (shape, call_user_function("cost_fn", cost_fn, *shape)) for shape in shapes
    )
    return np.array([check_cost(f"cost_fn{shape}", cost) for shape, cost in costs])


def call_user_function(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Calls the user's function, and turns any exception into a ValueError."""
    try:
        return function(*args)
    except Exception as error:
        raise ValueError(
            f"`{name}({', '.join(map(repr, args))})` raised {type(error).__name__}: "
            f"{error}. Fix the function."
        ) from error
