"""A part of the examples that a schedule is restricted to."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.digest import digest
from jaxbucket.base.lengths import Lengths, any_lengths
from jaxbucket.base.selection import selected_indices


def check_lengths_of(
    plan: BucketPlan, lengths: Lengths, subset: ArrayLike | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the lengths, `[N]` or `[N, Q]`, and the subset, `[N]` bool or None.

    Args:
      plan: the plan, which has to hold the examples of the subset only.
      lengths: `[N]` integers, or sequence name -> `[N]` integers.
      subset: `[N]` bool, or the indices of the examples; None for all of them.

    Raises:
      ValueError: if the plan refuses a length of the subset, or `subset` is invalid.
    """
    if subset is None:
        return plan.check(lengths), None
    columns = any_lengths(lengths, plan.sequences)
    indices = selected_indices("subset", subset, len(columns))
    is_selected = np.zeros(len(columns), bool)
    is_selected[indices] = True
    if np.count_nonzero(is_selected) < len(indices):
        raise ValueError(
            "`subset` has an index twice. Pass different ones, because an epoch has "
            "each example once."
        )
    # Every plan holds the other examples if their lengths are 1.
    mask = is_selected if columns.ndim == 1 else is_selected[:, None]
    plan.check(np.where(mask, columns, np.ones_like(columns, shape=())))
    return columns, is_selected


def subset_digest(subset: np.ndarray) -> str:
    """Returns 32 hex digits that identify a subset, `[N]` bool."""
    return digest(np.packbits(subset).data)
