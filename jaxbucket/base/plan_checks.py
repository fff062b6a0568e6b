"""Checks the fields of a plan."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from jaxbucket.base.bucket import Bucket
from jaxbucket.base.checks import check_choice
from jaxbucket.base.policies import OVERLONG, TRUNCATING
from jaxbucket.base.sizes import Sizes, total

if TYPE_CHECKING:
    from jaxbucket.base.buckets import BucketPlan

# `BucketPlan.assign` returns 16-bit integers.
_MAX_BUCKETS = 2**15 - 1


def check_buckets(plan: BucketPlan) -> None:
    """Raises a ValueError if a bucket violates a constraint of the plan."""
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
        _check_sequences(plan, "buckets", bucket.seq_len)
    for name in ("max_tokens", "seq_len_multiple"):
        if isinstance(value := getattr(plan, name), Sizes):
            _check_sequences(plan, name, value)
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


def _check_sequences(plan: BucketPlan, name: str, sizes: int | Sizes) -> None:
    names = list(sizes) if isinstance(sizes, Sizes) else []
    if names != list(plan.sequences):
        raise ValueError(
            f"`{name}` has the sequences {names}, but the first bucket has "
            f"{list(plan.sequences)}. Use the same sequences everywhere."
        )


def _check_budget(plan: BucketPlan, bucket: Bucket) -> None:
    for name, seq_len, budget in _budgets(plan, bucket):
        if bucket.batch_size * seq_len > budget:
            raise ValueError(
                f"Bucket {bucket} holds {bucket.batch_size * seq_len} tokens, more "
                f"than `{name}={budget}`. Lower its `batch_size` to "
                f"{budget // seq_len}."
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
    if not isinstance(policies, Mapping):
        check_choice("overlong", policies, OVERLONG)
        policies = dict.fromkeys(plan.sequences, policies)
    elif list(policies) != list(plan.sequences):
        raise ValueError(
            f"`overlong` has the sequences {list(policies)}, but the buckets have "
            f"{list(plan.sequences)}. Pass one policy for each."
        )
    for name, policy in policies.items():
        check_choice(f"overlong[{name!r}]", policy, OVERLONG)
    if "split" in policies.values():
        raise ValueError(
            "`overlong='split'` requires examples with one sequence. Choose 'error', "
            "'drop', 'truncate' or 'truncate_left'."
        )
    last = plan.buckets[-1].seq_len
    for policy in policies.values():
        if policy in TRUNCATING and last != plan.max_seq_lens:
            raise ValueError(
                f"`overlong={policy!r}` requires a last bucket that holds the longest "
                f"sequences, {plan.max_seq_lens}, but it has {last}. Add such a "
                "bucket, or choose 'error' or 'drop'."
            )


def check_cost_unit(plan: BucketPlan) -> None:
    """Raises a ValueError if the unit is not a name, or there are no costs in it."""
    if not isinstance(plan.cost_unit, str):
        raise ValueError(
            f"`cost_unit={plan.cost_unit!r}` is not a string. Pass the name of a unit, "
            "such as 's'."
        )
    if plan.step_costs is None and plan.cost_unit != "tokens":
        raise ValueError(
            f"`cost_unit={plan.cost_unit!r}` requires `step_costs`. Pass both, or "
            "remove `cost_unit`."
        )
