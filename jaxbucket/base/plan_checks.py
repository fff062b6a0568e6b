"""Checks the fields of a plan."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from jaxbucket.base.bucket import Bucket
from jaxbucket.base.checks import check_choice
from jaxbucket.base.policies import OVERLONG, OVERLONG_SEVERAL, TRUNCATING
from jaxbucket.base.sizes import PerSequence, Sizes, check_same_sequences, total

if TYPE_CHECKING:
    from jaxbucket.base.buckets import BucketPlan

# `BucketPlan.assign` returns 16-bit integers.
_MAX_BUCKETS = 2**15 - 1


def check_sequences(plan: BucketPlan) -> None:
    """Raises a ValueError if there are no buckets, or their sequences differ.

    A mapping in another field must have the sequences of the buckets, too.
    """
    if not plan.buckets:
        raise ValueError("`buckets` is empty. A plan needs at least one shape.")
    if len(plan) > _MAX_BUCKETS:
        raise ValueError(
            f"`buckets` has {len(plan)} shapes, more than {_MAX_BUCKETS}. "
            "Plan with fewer: each shape costs a compilation."
        )
    for bucket in plan.buckets:
        if not isinstance(bucket, Bucket):
            raise ValueError(
                f"`buckets` contains {bucket!r}. Use `Bucket(batch_size, seq_len)`."
            )
        names = bucket.seq_len if isinstance(bucket.seq_len, Sizes) else ()
        _check_names(plan, "buckets", names)
    for name in ("max_tokens", "seq_len_multiple"):
        if isinstance(value := getattr(plan, name), Mapping):
            _check_names(plan, name, value)


def check_buckets(plan: BucketPlan) -> None:
    """Raises a ValueError if a bucket violates a constraint of the plan."""
    for bucket in plan.buckets:
        _check_budget(plan, bucket)
        _check_multiples(plan, bucket)
    pairs = itertools.pairwise(bucket.seq_len for bucket in plan.buckets)
    if not all(before < after for before, after in pairs):
        seq_lens = [bucket.to_list()[1] for bucket in plan.buckets]
        raise ValueError(
            f"`buckets` has seq_lens {seq_lens}. Sort the buckets by strictly "
            "increasing `seq_len`."
        )


def _check_names(plan: BucketPlan, name: str, names: Collection[str]) -> None:
    check_same_sequences(name, names, plan.sequences, "the first bucket has")


def _check_budget(plan: BucketPlan, bucket: Bucket) -> None:
    budgets: list[Any] = [("max_tokens", bucket.tokens_per_row, plan.max_tokens)]
    if isinstance(plan.max_tokens, Sizes):
        budgets = [
            (f"max_tokens[{name!r}]", bucket.seq_len[name], budget)
            for name, budget in plan.max_tokens.items()
        ]
    for name, seq_len, budget in budgets:
        if bucket.batch_size * seq_len > budget:
            raise ValueError(
                f"Bucket {bucket} holds {bucket.batch_size * seq_len} tokens, more "
                f"than `{name}={budget}`. Lower its `batch_size` or its `seq_len`, or "
                f"raise `{name}`."
            )


def _check_multiples(plan: BucketPlan, bucket: Bucket) -> None:
    values = [("batch_size", bucket.batch_size, plan.batch_size_multiple)]
    seq_len, multiple = bucket.seq_len, plan.seq_len_multiple
    if isinstance(seq_len, Sizes):
        for name, size in seq_len.items():
            each = multiple[name] if isinstance(multiple, Sizes) else multiple
            values.append((f"seq_len[{name!r}]", size, each))
    else:
        values.append(("seq_len", seq_len, total(multiple)))
    for name, value, factor in values:
        if value % factor:
            raise ValueError(
                f"Bucket {bucket}: `{name}={value}` is not a multiple of "
                f"`{name.split('[')[0]}_multiple={factor}`."
            )


def checked_overlong(overlong: Any, sequences: Collection[str], others: str) -> Any:
    """Returns the policy for examples that are too long, or that for each sequence.

    Args:
      overlong: the policy, or a mapping from sequence name to a policy.
      sequences: the names of several sequences.
      others: what has these sequences, for `check_same_sequences`.

    Raises:
      ValueError: if a policy is unknown, or the names are others.
    """
    known = OVERLONG_SEVERAL if sequences else OVERLONG
    if not isinstance(overlong, Mapping):
        check_choice("overlong", overlong, known)
        return overlong
    check_same_sequences("overlong", overlong, sequences, others)
    for name, policy in overlong.items():
        check_choice(f"overlong[{name!r}]", policy, known)
    return PerSequence(overlong, "overlong")


def check_last(plan: BucketPlan) -> None:
    """Raises a ValueError if no bucket holds what truncation leaves of any example."""
    last = plan.buckets[-1].seq_len
    if plan.sequences and last != plan.max_seq_lens and _truncates(plan):
        raise ValueError(
            f"`overlong={plan.overlong!r}` requires a last bucket that holds the "
            f"longest sequences, {plan.max_seq_lens!r}, but it has {last!r}. Add such "
            "a bucket, or choose 'error' or 'drop'."
        )


def _truncates(plan: BucketPlan) -> bool:
    return any(plan.policy(name) in TRUNCATING for name in plan.sequences)


def check_cost_unit(plan: BucketPlan) -> None:
    """Raises a ValueError if there is a unit without costs."""
    if plan.step_costs is None and plan.cost_unit != "tokens":
        raise ValueError(
            f"`cost_unit={plan.cost_unit!r}` requires `step_costs`. Pass both, or "
            "remove `cost_unit`."
        )
