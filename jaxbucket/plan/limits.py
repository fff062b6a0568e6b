"""Limits of a plan's shapes, and how many rows a shape may have under them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from jaxbucket.base.buckets import OVERLONG, Bucket, BucketPlan, Overlong
from jaxbucket.base.checks import (
    check_accumulate,
    check_choice,
    check_cost,
    check_countable,
    check_positive,
    overlong_message,
)
from jaxbucket.plan.boundary_rules import Candidates
from jaxbucket.plan.costs import CostFn, unit_of
from jaxbucket.plan.histogram import cumulative

# With more possible T only those are candidates that some example needs, rounded up:
# others could save little, in the last batches of a bucket, but not provably nothing.
_MOST_ENDS = 1 << 18

Budget: TypeAlias = int | Callable[[int], int] | Sequence[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of every shape (B, T), and the cost of a step, as `plan_buckets` has them.

    Example: the largest B at some T, and a plan of these.
      >>> limits = Limits(max_tokens=4096, batch_size_multiple=8, seq_len_multiple=64)
      >>> limits.batch_sizes([128, 320, 512])
      array([32,  8,  8])
      >>> [str(bucket) for bucket in limits.plan([128, 320, 512]).buckets]
      ['[32, 128]', '[8, 320]', '[8, 512]']

    Attributes:
      max_tokens: the largest B * T, padding counted: an integer, a function of T, or
        one integer for each of the boundaries that you give.
      batch_size_multiple: every B is a multiple of it.
      seq_len_multiple: every T is a multiple of it.
      max_seq_len: T of the last bucket; None for the longest length, rounded up.
      min_batch_size: the fewest rows of a batch.
      max_batch_size: the most rows of a batch, whatever the budget; None for no limit.
      overlong: what happens to examples longer than the last bucket: "error", "drop",
        "truncate" or "split" (into chunks, by `split_source`).
      cost_fn: `(batch_size, seq_len)` -> the cost of a step; None counts tokens.
      accumulate: micro-batches of a step, of the same bucket, that are filled together.

    Raises:
      ValueError: for a value out of range, a `max_seq_len` that is not a multiple of
        `seq_len_multiple`, or limits of B that no B fulfills.
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
        self._check_batch_sizes()
        multiple, last = self.seq_len_multiple, self.max_seq_len
        if last is not None and last % multiple:
            raise ValueError(
                f"`max_seq_len={last}` is not a multiple of `seq_len_multiple="
                f"{multiple}`. Use {-(-last // multiple) * multiple}."
            )
        if self.cost_fn is not None and not callable(self.cost_fn):
            raise ValueError(
                f"`cost_fn={self.cost_fn!r}` is not a function of (batch_size, "
                "seq_len)."
            )

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_batch_sizes(self) -> None:
        most, multiple = self.max_batch_size, self.batch_size_multiple
        if most is None:
            return
        if most < multiple:
            raise ValueError(
                f"`max_batch_size={most}` is less than `batch_size_multiple="
                f"{multiple}`: no B fits. Raise it to {multiple}."
            )
        if most // multiple * multiple < self.min_batch_size:
            raise ValueError(
                f"`max_batch_size={most}` and `batch_size_multiple={multiple}` leave B "
                f"no room above `min_batch_size={self.min_batch_size}`. Lower that to "
                f"{most // multiple * multiple}."
            )

    def longest(self, lengths: np.ndarray) -> int:
        """Returns T of the last bucket.

        Raises:
          ValueError: if a length is beyond it and `overlong` is "error".
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

        Raises:
          ValueError: if no row of the last bucket fits `max_tokens`, or `max_tokens`
            has a budget for each of some boundaries.
        """
        if isinstance(self.max_tokens, tuple):
            raise ValueError(
                f"`max_tokens` has {len(self.max_tokens)} budgets, one for each "
                "bucket, which goes with your own `boundaries`: rules and optima take "
                "one budget, or a function of T."
            )
        last = self.longest(lengths)
        self._check_rows([last], self.batch_sizes([last]))
        ends, examples, tokens = cumulative(
            lengths, last, self.seq_len_multiple, self.overlong
        )
        # The histogram leaves out lengths of no example where there are too many.
        complete = len(ends) == last // self.seq_len_multiple <= _MOST_ENDS
        if not complete:
            reached = np.append(np.diff(examples, prepend=0)[:-1] > 0, True)
            ends, examples, tokens = ends[reached], examples[reached], tokens[reached]
        batch_sizes = self.batch_sizes(ends)
        # A budget that grows with T may hold long rows and no short ones.
        fit = np.flatnonzero(batch_sizes)
        self._check_step(batch_sizes[fit], ends[fit])
        return Candidates(
            ends[fit],
            examples[fit],
            tokens[fit],
            batch_sizes[fit] * self.accumulate,
            self.costs(batch_sizes[fit], ends[fit]) * self.accumulate,
            complete,
        )

    def _check_step(self, batch_sizes: np.ndarray, seq_lens: np.ndarray) -> None:
        """Raises a ValueError if 64 bits do not count the tokens of a step."""
        check_countable(
            int((batch_sizes * seq_lens).max()) * self.accumulate,
            "The tokens of a step, by `max_tokens` and "
            f"`accumulate={self.accumulate}`,",
            "Lower one of these.",
        )

    def batch_sizes(self, seq_lens: Sequence[int] | np.ndarray) -> np.ndarray:
        """`[n]` int64: the largest B at each T; 0 where there is none."""
        seq_lens = np.asarray(seq_lens, np.int64)
        rows = self._budgets(seq_lens) // seq_lens
        if self.max_batch_size is not None:
            rows = np.minimum(rows, self.max_batch_size)
        rows = rows // self.batch_size_multiple * self.batch_size_multiple
        return np.where(rows < self.min_batch_size, 0, rows)

    def _budgets(self, seq_lens: np.ndarray) -> np.ndarray:
        budget = self.max_tokens
        if isinstance(budget, tuple):
            return np.array(budget, np.int64)
        if not callable(budget):
            return np.full(len(seq_lens), budget, np.int64)
        budgets = ((t, _call("max_tokens", budget, t)) for t in seq_lens.tolist())
        return np.array([check_positive(f"max_tokens({t})", x) for t, x in budgets])

    def costs(self, batch_sizes: np.ndarray, seq_lens: np.ndarray) -> np.ndarray:
        """`[n]`: the cost of a step of each shape; int64 tokens, or float64."""
        if self.cost_fn is None:
            return batch_sizes * seq_lens
        return _costs(self.cost_fn, batch_sizes, seq_lens)

    def plan(self, seq_lens: Sequence[int] | np.ndarray) -> BucketPlan:
        """Returns the plan of the buckets that end at these T.

        Raises:
          ValueError: if no row fits one of them, or `max_tokens` has other than one
            budget for each.
        """
        seq_lens = np.asarray(seq_lens, np.int64)
        if isinstance(self.max_tokens, tuple) and len(self.max_tokens) != len(seq_lens):
            raise ValueError(
                f"`max_tokens` has {len(self.max_tokens)} budgets for "
                f"{len(seq_lens)} boundaries. Give one for each."
            )
        batch_sizes = self.batch_sizes(seq_lens)
        self._check_rows(seq_lens, batch_sizes)
        budget = self.max_tokens
        if not isinstance(budget, int):
            budget = int(self._budgets(seq_lens).max())
        plan = BucketPlan(
            tuple(map(Bucket, batch_sizes.tolist(), seq_lens.tolist())),
            max_tokens=budget,
            batch_size_multiple=self.batch_size_multiple,
            seq_len_multiple=self.seq_len_multiple,
            overlong=self.overlong,
        )
        return costed(plan, self.cost_fn)

    def _check_rows(
        self, seq_lens: Sequence[int] | np.ndarray, batch_sizes: np.ndarray
    ) -> None:
        """Raises a ValueError if no row fits one of them."""
        if batch_sizes.all():
            return
        bucket = int(np.argmin(batch_sizes))
        seq_len = int(seq_lens[bucket])
        budget = int(self._budgets(np.asarray(seq_lens, np.int64))[bucket])
        multiple = self.batch_size_multiple
        least = -(-self.min_batch_size // multiple) * multiple
        name = "min_batch_size" if least > multiple else "batch_size_multiple"
        lower = f"`{name}` or `max_seq_len`" if least > 1 else "`max_seq_len`"
        raise ValueError(
            f"`max_tokens={budget}` holds {budget // seq_len} rows of "
            f"`seq_len={seq_len}`, fewer than `{name}={getattr(self, name)}`. Raise "
            f"`max_tokens` to {seq_len * least}, or lower {lower}."
        )


def costed(plan: BucketPlan, cost_fn: CostFn | None) -> BucketPlan:
    """Returns the plan with the costs of its steps by a function; None counts tokens.

    Raises:
      ValueError: if a cost is not positive.
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
    """`[n]` float64: the cost of a step of each shape."""
    shapes = zip(batch_sizes.tolist(), seq_lens.tolist(), strict=True)
    costs = ((shape, _call("cost_fn", cost_fn, *shape)) for shape in shapes)
    return np.array([check_cost(f"cost_fn{shape}", cost) for shape, cost in costs])


def _call(name: str, function: Callable[..., Any], *args: int) -> Any:
    """Calls the user's function; whatever it raises becomes a ValueError."""
    try:
        return function(*args)
    except Exception as error:
        raise ValueError(
            f"`{name}({', '.join(map(str, args))})` raised {type(error).__name__}: "
            f"{error}. Mend the function."
        ) from error
