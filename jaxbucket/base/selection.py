"""Checks a selection of examples."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def selected_indices(name: str, selected: ArrayLike, size: int) -> np.ndarray:
    """Returns the indices of the selected examples, `[M]` int64.

    Example:
      >>> selected_indices("subset", [True, False, True], 3)
      array([0, 2])

    Args:
      name: the name of the argument, for messages.
      selected: `[N]` bool, whether each example is selected; or `[M]` indices.
      size: the number of examples, N.
    """
    given = array = np.asarray(selected)
    if array.dtype == bool and array.shape == (size,):
        array = np.flatnonzero(array)
    is_index = array.ndim == 1 and array.size and array.dtype.kind in "iu"
    if not is_index or array.min() < 0 or array.max() >= size:
        raise ValueError(
            f"`{name}` is {given}, {given.dtype}{list(given.shape)}. Pass at least one "
            f"index from 0 to {size - 1}, or {size} bool, not all of them False."
        )
    if array.size == size > 2 and array.max() <= 1:
        raise ValueError(
            f"`{name}` has only 0 and 1 for {size} examples. Pass "
            f"`{name}.astype(bool)`, because integers are indices."
        )
    return array.astype(np.int64)
