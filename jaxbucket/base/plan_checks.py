"""Checks the fields of a plan."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxbucket.base.bucket import Bucket
from jaxbucket.base.checks import check_choice
from jaxbucket.base.policies import OVERLONG, OVERLONG_SEVERAL, TRUNCATING
from jaxbucket.base.sizes import PerSequence, Sizes, check_same_sequences

if TYPE_CHECKING:
    from jaxbucket.base.buckets import BucketPlan

# `BucketPlan.assign` returns 16-bit integers.
_MAX_BUCKETS = 2**15 - 1


def checked_overlong(overlong: Any, sequences: Collection[str], others: str) -> Any:
    """Returns the policy for examples that are too long, or that for each sequence.

    Equal policies of all sequences are one policy.

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
    policies = set(overlong.values())
    return policies.pop() if len(policies) == 1 else PerSequence(overlong, "overlong")


def check_shapes(plan: BucketPlan) -> None:
    """Raises a ValueError unless the buckets increase and have the same sequences."""
    buckets = plan.buckets
    if not (0 < len(buckets) <= _MAX_BUCKETS):
        raise ValueError(
            f"`buckets` has {len(buckets)} shapes. Pass 1 to {_MAX_BUCKETS}."
        )
    if not all(isinstance(bucket, Bucket) for bucket in buckets):
        raise ValueError(f"`buckets={buckets}`: pass `Bucket(batch_size, seq_len)`.")
    for bucket in buckets:
        names = bucket.seq_len if isinstance(bucket.seq_len, Sizes) else ()
        check_same_sequences("buckets", names, plan.sequences, "the first bucket has")
    pairs = itertools.pairwise(bucket.seq_len for bucket in buckets)
    if not all(before < after for before, after in pairs):
        raise ValueError(
            f"`buckets` has the seq_lens {plan.seq_lens.tolist()}. Sort the buckets by "
            "strictly increasing `seq_len`."
        )


def check_limits(plan: BucketPlan) -> None:
    """Raises a ValueError if a bucket violates a limit of the plan."""

    def each(value: Any) -> Any:
        return list(value.values()) if isinstance(value, Sizes) else value

    tokens = plan.batch_sizes[:, None] * plan.seq_lens
    if not isinstance(plan.max_tokens, Sizes):
        tokens = tokens.sum(axis=1, keepdims=True)
    violations = {
        "max_tokens": tokens > each(plan.max_tokens),
        "batch_size_multiple": plan.batch_sizes % plan.batch_size_multiple > 0,
        "seq_len_multiple": plan.seq_lens % each(plan.seq_len_multiple) > 0,
    }
    for name, violated in violations.items():
        if violated.any():
            bucket = plan.buckets[int(np.argwhere(violated)[0, 0])]
            raise ValueError(
                f"Bucket {bucket}, with {bucket.num_tokens} tokens, does not fit "
                f"`{name}={getattr(plan, name)!r}`. Change one of the two."
            )
    # Truncation limits each sequence by itself.
    last = plan.buckets[-1].seq_len
    truncates = any(plan.policy(name) in TRUNCATING for name in plan.sequences)
    if truncates and last != plan.max_seq_lens:
        raise ValueError(
            f"`overlong={plan.overlong!r}` requires a last bucket that holds the "
            f"longest sequences, {plan.max_seq_lens!r}, but it has {last!r}. Add such "
            "a bucket, or choose 'error' or 'drop'."
        )
