"""Applies the policy for overlong examples before lengths are packed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.policies import Overlong
from jaxbucket.plan.chunks import chunk_lengths


def kept_lengths(
    lengths: Any,
    max_seq_len: int | Mapping[str, int],
    overlong: Overlong | Mapping[str, Overlong],
) -> Any:
    """Returns the lengths after dropping, truncating or splitting overlong examples.

    Example:
      >>> kept_lengths([3, 9, 5], 6, "truncate"), kept_lengths([3, 9, 5], 6, "drop")
      (array([3, 6, 5]), array([3, 5]))

    Args:
      lengths: `[N]` integers, one per example; or sequence name -> `[N]` integers.
      max_seq_len: T of the longest row.
      overlong: the policy, as in a `BucketPlan`.

    Returns:
      `[n]`, or sequence name -> `[n]`.

    Raises:
      ValueError: if `BucketPlan` raises it, or no example is left.
    """
    if overlong == "split" and not isinstance(max_seq_len, Mapping):
        return chunk_lengths(np.asarray(lengths), max_seq_len)
    plan = BucketPlan.from_shapes([(1, max_seq_len)], overlong=overlong)
    kept = plan.kept_lengths(lengths)
    if not len(kept):
        raise ValueError(
            f"`overlong={overlong!r}` leaves out every example. Raise "
            f"`max_seq_len={max_seq_len!r}`."
        )
    if not plan.sequences:
        return kept
    return dict(zip(plan.sequences, kept.T, strict=True))
