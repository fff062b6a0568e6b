"""From the easy to the hard: orders by a difficulty that a pacing function opens up."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.digest import digest
from jaxbucket.schedule.difficulty_index import DifficultyIndex
from jaxbucket.schedule.orders import EpochOrder, Order
from jaxbucket.schedule.paced_order import EasyDraws, Pace, PacedOrder
from jaxbucket.schedule.pacing import (
    LinearPacing,
    Pacing,
    check_pacing,
    pacing_name,
)

# Below this, every integer is a float.
_EXACT = 2.0**53


class Curriculum(Order):
    """An order: at every step, only what is easy enough.

    The pacing function opens a share of the examples, the easiest ones and all that are
    as easy. A batch is drawn at random among those that are open and were not in the
    epoch yet; only where they fill no batch of any bucket, the easiest of the others
    fill up the batch that needs the least hard ones. So an epoch still holds every
    example once, and what is drawn early is missing later on.

    With `replacement=True` every step draws from all that is open, whatever was
    drawn before: easy examples come again and again, and an epoch is only a number of
    steps.

    Example:
      >>> from jaxbucket import BatchSchedule, Bucket, BucketPlan
      >>> plan = BucketPlan((Bucket(2, 8),), max_tokens=16)
      >>> order = Curriculum([5, 1, 4, 2, 3, 6], LinearPacing(start=0.3))
      >>> for batch in BatchSchedule(plan, [8] * 6, order=order):
      ...     print(sorted(batch.rows.tolist()))
      [1, 3]
      [2, 4]
      [0, 5]

    Args:
      difficulty: `[N]` finite numbers, one for each example, or a `DifficultyIndex`. It
        is referred to and not copied: do not change the array afterwards.
      pacing: epochs done -> share that is open, from 0 to 1; by default
        `LinearPacing()`. It may fall, for example in cycles. A schedule that was made
        by `continue_with` counts its own epochs.
      replacement: see above.

    Raises:
      ValueError: if `difficulty` is empty, not `[N]` or not finite, or `pacing` is no
        function.
    """

    def __init__(
        self,
        difficulty: ArrayLike | DifficultyIndex,
        pacing: Pacing | None = None,
        *,
        replacement: bool = False,
    ):
        self.difficulty = _check_difficulty(difficulty)
        self._index = difficulty if isinstance(difficulty, DifficultyIndex) else None
        self.pacing = LinearPacing() if pacing is None else pacing
        check_pacing(self.pacing)
        self.replacement = bool(replacement)
        self.within = self.difficulty if self.replacement else "source"

    def __repr__(self) -> str:
        return (
            f"Curriculum({len(self.difficulty)} examples, {self.pacing}, "
            f"replacement={self.replacement})"
        )

    def __str__(self) -> str:
        """A name that tells it from others, by what it does."""
        kind = "curriculum with replacement" if self.replacement else "curriculum"
        return f"{kind} {self._fingerprint[:16]}"

    def check(self, num_examples: int, *, is_packed: bool) -> None:
        if len(self.difficulty) != num_examples:
            raise ValueError(
                f"`difficulty` has {len(self.difficulty)} entries for {num_examples} "
                "lengths. Give one for each example."
            )
        if is_packed:
            raise ValueError(
                "`order` is a `Curriculum`, which ranks examples, and `packing` puts "
                "easy ones and hard ones into one row. Leave out either."
            )

    def epoch_order(self, rows, lengths, seed, opening) -> EpochOrder:
        drops = rows.plan.overlong == "drop"
        is_kept = lengths <= rows.plan.max_seq_len if drops else None
        pace = Pace(self.pacing, self.in_order(is_kept), rows.num_batches)
        if not self.replacement:
            return PacedOrder(self.difficulty, pace, rows, seed, opening)
        if opening is not None:
            raise ValueError(
                "`opening` plans the beginning of an epoch that has every example "
                "once, which one with `replacement=True` has not. Leave out either."
            )
        return EasyDraws(self.difficulty, pace, rows, seed)

    def in_order(self, is_kept: np.ndarray | None) -> np.ndarray:
        """Returns the difficulties of all examples, or of `[N]` kept ones, sorted."""
        difficulty = self.difficulty
        if self._index is None or self._index.sorted_by != "all":
            return np.sort(difficulty if is_kept is None else difficulty[is_kept])
        # The index has sorted them already.
        examples = self._index.examples
        return difficulty[examples if is_kept is None else examples[is_kept[examples]]]

    @functools.cached_property
    def _fingerprint(self) -> str:
        pacing = "\n".join(pacing_name(self.pacing))
        return digest(_same_bytes(self.difficulty), pacing.encode())


def _check_difficulty(difficulty: ArrayLike | DifficultyIndex) -> np.ndarray:
    if isinstance(difficulty, DifficultyIndex):
        # Of examples that are not in the order of all, their place is what counts.
        is_by_all = difficulty.sorted_by == "all"
        return difficulty.difficulty if is_by_all else difficulty.ranks()
    try:
        array = np.asarray(difficulty)
    except ValueError:
        raise ValueError(
            "`difficulty` is ragged: give one number for each example, [N]."
        ) from None
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iuf":
        raise ValueError(
            f"`difficulty` is {array.dtype}{list(array.shape)}: give one number for "
            "each example, [N]."
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        bad = int(np.argmin(np.isfinite(array)))
        raise ValueError(
            f"`difficulty[{bad}]={array[bad]}` is not finite. Give the example a "
            "number, or leave it out."
        )
    return array


def _same_bytes(difficulty: np.ndarray) -> bytes | memoryview:
    """The numbers, whatever their dtype."""
    as_floats = np.ascontiguousarray(difficulty, "<f8")
    if difficulty.dtype.kind != "f" and np.any(abs(as_floats) >= _EXACT):
        # Not all of these are floats.
        return "\n".join(map(str, difficulty.tolist())).encode()
    return as_floats.data
