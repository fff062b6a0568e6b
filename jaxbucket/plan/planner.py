"""Plans buckets: chooses boundaries, then the batch size of each bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

import numpy as np

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import check_choice, check_positive
from jaxbucket.base.length_counts import LengthCounts
from jaxbucket.base.policies import Overlong
from jaxbucket.base.sizes import Counted
from jaxbucket.plan import boundary_rules
from jaxbucket.plan.boundary_rules import Chooser
from jaxbucket.plan.candidates import Candidates
from jaxbucket.plan.costs import CostFn
from jaxbucket.plan.joint_planner import plan_sequences, plan_sequences_at
from jaxbucket.plan.limits import Budget, Limits
from jaxbucket.plan.optimal import optimal
from jaxbucket.plan.tally import Tally

Rule: TypeAlias = Literal[
    "optimal",
    "quantile",
    "equal_tokens",
    "equal_width",
    "quarters",
    "geometric",
    "powers_of_two",
]
Boundaries: TypeAlias = Rule | Sequence[int] | Sequence[Mapping[str, int]]

RULES: dict[str, Chooser] = {"optimal": optimal, **boundary_rules.RULES}


def plan_buckets(
    lengths: Counted,
    *,
    max_tokens: Budget,
    num_buckets: int = 8,
    batch_size_multiple: int | Callable[[Any], int] = 1,
    seq_len_multiple: int | Mapping[str, int] = 1,
    max_seq_len: int | Mapping[str, int] | None = None,
    boundaries: Boundaries = "optimal",
    overlong: Overlong | Mapping[str, Overlong] = "error",
    cost_fn: CostFn | None = None,
    accumulate: int = 1,
    sample: bool = False,
) -> BucketPlan:
    """Returns a plan of at most `num_buckets` shapes (B, T) for the given lengths.

    Every T is a multiple of `seq_len_multiple`, every B one of `batch_size_multiple`,
    and B * T is at most `max_tokens`. A bucket has as few batches as the largest such B
    needs for its examples, and the smallest B for these. Choose both multiples once for
    all machines: they are never read from the hardware, so that a plan does not depend
    on the machine that computes it. `plan_within` also limits B itself, and
    `plan_curve` chooses the number of shapes.

    Example:
      >>> import numpy as np
      >>> lengths = np.random.default_rng(0).integers(1, 500, size=1000)
      >>> plan = plan_buckets(
      ...     lengths, max_tokens=4096, num_buckets=3, seq_len_multiple=64
      ... )
      >>> [str(bucket) for bucket in plan.buckets]
      ['[29, 128]', '[12, 320]', '[8, 512]']

    If examples have several sequences, such as source and target, a bucket has a T for
    each, and the buckets are planned in all of them at once. Then
    `max_tokens`, `seq_len_multiple`, `max_seq_len` and `overlong` may be mappings from
    sequence name to a value, and functions receive such a mapping in place of T.

    Example:
      >>> pairs = {"source": lengths, "target": lengths[::-1]}
      >>> plan = plan_buckets(
      ...     pairs, max_tokens=4096, num_buckets=3, seq_len_multiple=64
      ... )
      >>> print(plan.buckets[-1])
      [4, source 512, target 512]

    Args:
      lengths: `[N]` integers, one per example, or their `LengthCounts`; or sequence
        name -> `[N]` integers.
      max_tokens: the largest number of tokens in a global batch, padding counted. An
        integer, a function of T that returns an integer, or, if `boundaries` is a
        sequence of lengths, one integer for each.
      num_buckets: the largest number of shapes. Each shape costs one compilation.
      batch_size_multiple: every B is a multiple of this number, for example of the
        number of devices on the batch axes; or a function of T (see `device_limits`).
      seq_len_multiple: every T is a multiple of this number, for example of the tile
        size of the accelerator's matrix unit.
      max_seq_len: T of the last bucket, a multiple of `seq_len_multiple`. By default
        the longest length, rounded up. With several sequences and by default, no bucket
        has to hold the longest lengths of all of them, unless these are truncated.
      boundaries: the rule that chooses the boundaries. "optimal" minimizes the cost of
        an epoch, remainders included (see `optimal.optimal` for the precision), with as
        few batches in each bucket as the largest B needs. The other rules are
        heuristics: "quantile" puts the same number of examples in each bucket,
        "equal_tokens" the same number of tokens; "equal_width" and "geometric" increase
        T by a constant step or ratio, "quarters" uses four equal steps, and
        "powers_of_two" uses the largest powers of two. You can also pass increasing
        lengths; then `num_buckets` is ignored, and `max_seq_len` is the last of them.
        With several sequences, pass "optimal" or a list of mappings with a T for each.
        To fix B as well, use `BucketPlan.from_shapes`.
      overlong: what to do with examples longer than the last bucket: "error", "drop",
        "truncate", "truncate_left" to keep their last tokens, or "split" to plan for
        the chunks that `split_source` returns.
      cost_fn: `(batch_size, seq_len)` -> the cost of a step, by default its tokens:
        `TokenCost`, `TransformerCost`, `StepTime`, or your own function. The cost of an
        epoch is the sum over its steps.
      accumulate: the number of micro-batches per step, if `BatchSchedule` takes them
        from the same bucket.
      sample: whether `lengths` are a sample of more examples, such as of a stream. Then
        every B is the largest within the limits, even if the sample does not fill it.

    Raises:
      ValueError: if there are no lengths, one is not a positive integer (an example may
        have length 0 in some of several sequences), or one is longer than
        `max_seq_len` under `overlong="error"`; if the budget cannot hold
        `batch_size_multiple` rows of the last bucket; if the boundaries are not
        increasing multiples of `seq_len_multiple`.
    """
    limits = Limits(
        max_tokens=max_tokens,
        batch_size_multiple=batch_size_multiple,
        seq_len_multiple=seq_len_multiple,
        max_seq_len=max_seq_len,
        overlong=overlong,
        cost_fn=cost_fn,
        accumulate=accumulate,
        sample=sample,
        sequences=tuple(lengths) if isinstance(lengths, Mapping) else (),
    )
    return plan_within(lengths, limits, num_buckets=num_buckets, boundaries=boundaries)


def plan_within(
    lengths: Counted,
    limits: Limits,
    *,
    num_buckets: int = 8,
    boundaries: Boundaries = "optimal",
) -> BucketPlan:
    """Returns the plan of `plan_buckets` within limits.

    Example: batches of at most 16 rows.
      >>> limits = Limits(max_tokens=64, max_batch_size=16)
      >>> print(plan_within([1] * 90, limits).buckets[0])
      [15, 1]

    Args:
      lengths: `[N]` integers, one per example, or their `LengthCounts`; or sequence
        name -> `[N]` integers.
      limits: the limits of all shapes, and the cost of a step.
      num_buckets: the largest number of shapes.
      boundaries: a rule, or increasing lengths, as for `plan_buckets`.

    Raises:
      ValueError: if `plan_buckets` raises it.
    """
    limits = limits.of(lengths)
    num_buckets = check_positive("num_buckets", num_buckets)
    given: list[Any] | None = None
    if isinstance(boundaries, Iterable) and not isinstance(boundaries, str):
        given = list(boundaries)
    if isinstance(lengths, Mapping):
        if given is not None:
            return plan_sequences_at(given, lengths, limits)
        if boundaries != "optimal":
            raise ValueError(
                f"`boundaries={boundaries!r}` requires examples with one length. Use "
                "'optimal', or a list of mappings from sequence name to T."
            )
        return plan_sequences(lengths, limits, num_buckets)
    counted, rule = LengthCounts.of(lengths), cast(Rule, boundaries)
    if given is not None:
        return _plan_at(given, counted, limits)
    check_choice("boundaries", rule, sorted(RULES))
    candidates = Candidates.of(counted, limits)
    chosen = RULES[rule](candidates, min(num_buckets, len(candidates)))
    return limits.plan(candidates.seq_lens[chosen], candidates.counts(chosen))


def _plan_at(
    boundaries: list[Any], lengths: LengthCounts, limits: Limits
) -> BucketPlan:
    """Returns the plan with the boundaries that the user gave."""
    array, multiple = np.asarray(boundaries), int(limits.multiples[0])
    is_valid = array.ndim == 1 and array.size and array.dtype.kind in "iu"
    steps = np.diff(array, prepend=0) if is_valid else np.zeros(1)
    if (steps < 1).any() or (steps % multiple).any():
        raise ValueError(
            f"`boundaries={boundaries}`: pass increasing multiples of "
            f"`seq_len_multiple={multiple}`."
        )
    limits.check_boundaries(array[:, None])
    plan = limits.plan(boundaries)
    return limits.plan(boundaries, Tally.of(plan, lengths).examples)
