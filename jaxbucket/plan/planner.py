"""From lengths to a plan: which boundaries, then the rows each bucket may hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.buckets import BucketPlan, Overlong
from jaxbucket.base.checks import check_lengths, check_positive
from jaxbucket.base.progress import bar_if_slow
from jaxbucket.plan import boundary_rules
from jaxbucket.plan.boundary_rules import Chooser
from jaxbucket.plan.costs import CostFn
from jaxbucket.plan.curve import plan_curve
from jaxbucket.plan.limits import Budget, Limits
from jaxbucket.plan.optimal import optimal

Rule: TypeAlias = Literal[
    "optimal",
    "quantile",
    "equal_tokens",
    "equal_width",
    "quarters",
    "geometric",
    "powers_of_two",
]
Boundaries: TypeAlias = Rule | Sequence[int] | Chooser

RULES: dict[str, Chooser] = {"optimal": optimal, **boundary_rules.RULES}


@bar_if_slow("Planning buckets")
def plan_buckets(
    lengths: ArrayLike,
    *,
    max_tokens: Budget,
    num_buckets: int | Literal["auto"] = 8,
    batch_size_multiple: int = 1,
    seq_len_multiple: int = 1,
    max_seq_len: int | None = None,
    min_batch_size: int = 1,
    max_batch_size: int | None = None,
    boundaries: Boundaries = "optimal",
    overlong: Overlong = "error",
    cost_fn: CostFn | None = None,
    accumulate: int = 1,
    compile_seconds: float | None = None,
    num_epochs: float = 1,
) -> BucketPlan:
    """Returns at most `num_buckets` shapes (B, T) for examples of these lengths.

    T is a multiple of `seq_len_multiple`, and B the largest multiple of
    `batch_size_multiple` with B * T <= `max_tokens`. Both multiples are yours to
    choose once: a plan must not depend on the machine it happens to run on.

    Example:
      >>> import numpy as np
      >>> lengths = np.random.default_rng(0).integers(1, 500, size=1000)
      >>> plan = plan_buckets(
      ...     lengths, max_tokens=4096, num_buckets=3, seq_len_multiple=64
      ... )
      >>> [str(bucket) for bucket in plan.buckets]
      ['[21, 192]', '[10, 384]', '[8, 512]']

    Args:
      lengths: `[N]` integers, one per example.
      max_tokens: the hard budget of a global batch, padding counted. Or a function of
        T that returns it, or one for each of the boundaries that you give.
      num_buckets: the most shapes; each costs one compilation. "auto" weighs these, up
        to 32, against the padding that they save, as `plan_curve` does.
      batch_size_multiple: for example the number of devices on the batch axes.
      seq_len_multiple: for example the tile of the accelerator's matrix unit.
      max_seq_len: T of the last bucket, a multiple of `seq_len_multiple`. By default
        the longest length, rounded up.
      min_batch_size: the fewest rows of a batch.
      max_batch_size: the most rows of a batch, whatever the budget.
      boundaries: "optimal" gives the cheapest epoch, remainders included
        (`optimal.optimal` says how exactly). Rules of thumb: "quantile" puts equally
        many examples in each bucket, "equal_tokens" equally many tokens;
        "equal_width" and "geometric" grow T by a constant step or ratio, "quarters"
        has four equal steps, "powers_of_two" the largest of these. Or your own:
        increasing lengths (then `num_buckets` and `max_seq_len` are not used), or a
        function of (`Candidates`, `num_buckets`). For shapes whose B is fixed, too, see
        `BucketPlan.from_shapes`.
      overlong: what to do with examples longer than the last bucket: "error", "drop",
        "truncate", or "split" to plan for the chunks that `split_source` makes of them.
      cost_fn: `(batch_size, seq_len)` -> the cost of a step, by default its tokens:
        `TokenCost`, `TransformerCost`, `StepTime`, or your own function. The cost of an
        epoch is the sum over its steps.
      accumulate: micro-batches of a step, where `BatchSchedule` has several of the
        same bucket: they are filled together.
      compile_seconds: with `num_buckets="auto"`, the seconds of compiling one shape.
      num_epochs: with `num_buckets="auto"`, for how many epochs the shapes are used.

    Raises:
      ValueError: for lengths that are empty, not integers or not positive, or longer
        than `max_seq_len` under `overlong="error"`; for a budget that cannot hold
        `batch_size_multiple` rows of the last bucket; for boundaries that are not
        increasing multiples of `seq_len_multiple`.
    """
    limits = Limits(
        max_tokens=max_tokens,
        batch_size_multiple=batch_size_multiple,
        seq_len_multiple=seq_len_multiple,
        max_seq_len=max_seq_len,
        min_batch_size=min_batch_size,
        max_batch_size=max_batch_size,
        overlong=overlong,
        cost_fn=cost_fn,
        accumulate=accumulate,
    )
    if num_buckets != "auto":
        return plan_within(lengths, limits, num_buckets, boundaries)
    if not isinstance(boundaries, str) or boundaries != "optimal":
        raise ValueError(
            f"`num_buckets='auto'` chooses among optimal plans: leave out "
            f"`boundaries={boundaries!r}`, or give a number of buckets."
        )
    curve = plan_curve(
        lengths, limits, compile_seconds=compile_seconds, num_epochs=num_epochs
    )
    return curve.chosen.plan


def plan_within(
    lengths: ArrayLike, limits: Limits, num_buckets: int, boundaries: Boundaries
) -> BucketPlan:
    """As `plan_buckets`, whose other options `limits` holds."""
    lengths = check_lengths(lengths)
    num_buckets = check_positive("num_buckets", num_buckets)
    if isinstance(boundaries, Iterable) and not isinstance(boundaries, str):
        return _plan_of(list(boundaries), lengths, limits)
    chooser = _chooser(boundaries)
    candidates = limits.candidates(lengths)
    num_buckets = min(num_buckets, len(candidates))
    try:
        chosen = chooser(candidates, num_buckets)
    except Exception as error:
        raise ValueError(
            f"`boundaries={boundaries!r}` raised {type(error).__name__}: {error}. Give "
            "a function of (`Candidates`, `num_buckets`)."
        ) from error
    chosen = _check_chosen(chosen, len(candidates), num_buckets)
    return limits.plan(candidates.seq_lens[chosen])


def _plan_of(boundaries: list[Any], lengths: np.ndarray, limits: Limits) -> BucketPlan:
    """The plan of the user's own boundaries."""
    remedy = (
        f"Pass increasing multiples of `seq_len_multiple={limits.seq_len_multiple}`."
    )
    if not boundaries:
        raise ValueError(f"`boundaries` is empty. {remedy}")
    before = 0
    for boundary in boundaries:
        is_integer = isinstance(boundary, int | np.integer) and boundary is not True
        if not is_integer or boundary <= before or boundary % limits.seq_len_multiple:
            raise ValueError(f"`boundaries`: {boundary!r} after {before}. {remedy}")
        before = check_positive("boundaries", boundary)
    plan = limits.plan(boundaries)
    if limits.overlong == "error":
        plan.check(lengths)
    return plan


def _chooser(boundaries: str | Chooser) -> Chooser:
    if callable(boundaries):
        return boundaries
    if boundaries not in RULES:
        raise ValueError(
            f"`boundaries={boundaries!r}`: choose one of {sorted(RULES)}, or pass "
            "increasing lengths or a function."
        )
    return RULES[boundaries]


def _check_chosen(chosen: Any, num_candidates: int, num_buckets: int) -> np.ndarray:
    """Returns the positions that a chooser returned, which may be the user's own."""
    chosen = np.asarray(chosen)
    if (
        chosen.ndim != 1
        or not np.issubdtype(chosen.dtype, np.integer)
        or np.any(np.diff(chosen, prepend=-1) < 1)
        or not chosen.size
        or chosen[-1] != num_candidates - 1
    ):
        raise ValueError(
            f"`boundaries` chose {chosen.tolist()}: a function must return increasing "
            f"positions of candidates, the last of them {num_candidates - 1}."
        )
    if len(chosen) > num_buckets:
        raise ValueError(
            f"`boundaries` chose {len(chosen)} ends for `num_buckets={num_buckets}`: a "
            "function must return no more."
        )
    return chosen
