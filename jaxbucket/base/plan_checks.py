"""Checks the fields of a plan."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from jaxbucket.base.bucket import Bucket
from jaxbucket.base.checks import check_choice
from jaxbucket.base.policies import OVERLONG, OVERLONG_SEVERAL, TRUNCATING
from jaxbucket.base.sizes import Sizes, check_same_sequences, total

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
    for name in ("max_tokens", "seq_len_multiple", "overlong"):
        if not isinstance(value := getattr(plan, name), Mapping):
            continue
        if not plan.sequences:
            raise ValueError(
                f"`{name}={dict(value)!r}` is a mapping, but the buckets have one "
                "sequence. Pass the value itself."
            )
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
    for name, seq_len, budget in _budgets(plan, bucket):
        if bucket.batch_size * seq_len > budget:
            multiple = plan.batch_size_multiple
            most = budget // seq_len // multiple * multiple
            remedy = f"Lower its `batch_size` to {most}."
            if not most:
                remedy = f"Lower its `seq_len`, or raise `{name}`."
            raise ValueError(
                f"Bucket {bucket} holds {bucket.batch_size * seq_len} tokens, more "
                f"than `{name}={budget}`. {remedy}"
            )


def _budgets(plan: BucketPlan, bucket: Bucket) -> Iterator[tuple[str, int, int]]:
    """Yields the name of each budget, the T that counts for it, and the budget."""
    if not isinstance(plan.max_tokens, Sizes):
        yield "max_tokens", bucket.tokens_per_row, plan.max_tokens
    elif isinstance(bucket.seq_len, Sizes):
        for name, budget in plan.max_tokens.items():
            yield f"max_tokens[{name!r}]", bucket.seq_len[name], budget


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


def check_overlong(plan: BucketPlan) -> None:
    """Raises a ValueError if a policy is unknown or does not fit the buckets."""
    policies = plan.overlong
    if not plan.sequences:
        check_choice("overlong", policies, OVERLONG)
        return
    if policies == "split":
        raise ValueError(
            "`overlong='split'` requires examples with one sequence. Choose 'error', "
            "'drop', 'truncate' or 'truncate_left'."
        )
    if not isinstance(policies, Mapping):
        check_choice("overlong", policies, OVERLONG_SEVERAL)
        policies = dict.fromkeys(plan.sequences, policies)
    for name, policy in policies.items():
        check_choice(f"overlong[{name!r}]", policy, OVERLONG_SEVERAL)
    last = plan.buckets[-1].seq_len
    for policy in policies.values():
        if policy in TRUNCATING and last != plan.max_seq_lens:
            raise ValueError(
                f"`overlong={policy!r}` requires a last bucket that holds the longest "
                f"sequences, {plan.max_seq_lens!r}, but it has {last!r}. Add such a "
                "bucket, or choose 'error' or 'drop'."
            )


def check_cost_unit(plan: BucketPlan) -> None:
    """Raises a ValueError if there is a unit without costs."""
    if plan.step_costs is None and plan.cost_unit != "tokens":
        raise ValueError(
            f"`cost_unit={plan.cost_unit!r}` requires `step_costs`. Pass both, or "
            "remove `cost_unit`."
        )
