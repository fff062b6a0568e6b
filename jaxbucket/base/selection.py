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

    Raises:
      ValueError: if no example is selected, or `selected` is neither `[N]` bool nor
        valid indices.
    """
    array = np.asarray(selected)
    if array.dtype == bool:
        if array.shape != (size,):
            raise ValueError(
                f"`{name}` is bool{list(array.shape)}, but there are {size} examples. "
                "Pass a bool for each of them, or indices."
            )
        array = np.flatnonzero(array)
    if array.size == 0:
        raise ValueError(f"`{name}` selects no example. Select at least one.")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"`{name}` is {array.dtype}{list(array.shape)}. Pass integers `[M]`, or a "
            "bool for each example."
        )
    if array.min() < 0 or array.max() >= size:
        bad = int(array[(array < 0) | (array >= size)][0])
        raise ValueError(
            f"`{name}` has the index {bad}, but there are {size} examples. Pass "
            f"indices from 0 to {size - 1}."
        )
    if array.size == size > 2 and array.max() <= 1:
        raise ValueError(
            f"`{name}` has only 0 and 1 for {size} examples. Pass "
            f"`{name}.astype(bool)`, because integers are indices."
        )
    return array.astype(np.int64)
