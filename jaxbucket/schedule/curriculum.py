"""Curricula: orders from easy to hard, with a pacing function that unlocks examples."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.digest import digest
from jaxbucket.schedule.difficulty_index import DifficultyIndex
from jaxbucket.schedule.orders import EpochOrder, Order
from jaxbucket.schedule.pace import Pace
from jaxbucket.schedule.paced_order import EasyDraws, PacedOrder
from jaxbucket.schedule.pacing import (
    LinearPacing,
    Pacing,
    check_pacing,
    pacing_name,
)

# Below this, every integer has an exact float64.
_MAX_EXACT_FLOAT = 2.0**53


class Curriculum(Order):
    """An order in which every step draws only from examples that are easy enough.

    The pacing function opens a share of the examples: the easiest ones, including all
    ties. A batch is drawn at random from the open examples that have not been in this
    epoch yet. If these cannot fill a batch of any bucket, a batch is completed with the
    easiest examples that are not open yet, in the bucket where its hardest example is
    the least difficult. So every epoch still contains each example once, and examples
    that were drawn early are missing later in it.

    With `replacement=True`, every step draws from all open examples, including those
    that were drawn before. Easy examples then repeat often, and an epoch is merely a
    number of steps.

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
      difficulty: `[N]` finite numbers, one per example, or a `DifficultyIndex`. The
        array is not copied, so do not modify it afterwards.
      pacing: a function from the number of completed epochs to the share of examples
        that is open, from 0 to 1; by default `LinearPacing()`. The share may fall, for
        example in cycles. A function with an attribute `unit`, "steps" or "tokens",
        gets the number of completed steps, or of real tokens if every step had the
        mean of an epoch. A schedule created by `continue_with` counts its own epochs,
        steps and tokens.
      replacement: whether every step draws from all open examples, as described above.

    Raises:
      ValueError: if `difficulty` is empty, not `[N]` or not finite, or if `pacing` is
        not callable.
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
        """Returns a name that identifies the difficulties and the options."""
        kind = "curriculum with replacement" if self.replacement else "curriculum"
        return f"{kind} {self._fingerprint[:16]}"

    def check(self, num_examples: int, *, is_packed: bool) -> None:
        if len(self.difficulty) != num_examples:
            raise ValueError(
                f"`difficulty` has {len(self.difficulty)} entries for {num_examples} "
                "lengths. Pass one difficulty for each example."
            )
        if is_packed:
            raise ValueError(
                "`order` is a `Curriculum`, which ranks single examples, but `packing` "
                "puts several examples into a row. Remove one of the two."
            )

    def epoch_order(self, rows, lengths, seed, opening) -> EpochOrder:
        kept = self.sorted_difficulty(rows.is_kept())
        pace = Pace(self.pacing, kept, rows)
        if not self.replacement:
            return PacedOrder(self.difficulty, pace, rows, seed, opening)
        if opening is not None:
            raise ValueError(
                "`opening` requires `replacement=False`, because it rearranges the "
                "batches of an epoch that has every example once. Remove one of the "
                "two."
            )
        return EasyDraws(self.difficulty, pace, rows, seed)

    def sorted_difficulty(self, is_kept: np.ndarray | None) -> np.ndarray:
        """Returns the sorted difficulties of the kept examples, all if None."""
        difficulty = self.difficulty
        if self._index is None or self._index.sorted_by != "all":
            return np.sort(difficulty if is_kept is None else difficulty[is_kept])
        # The index already holds the sorted order.
        examples = self._index.examples
        return difficulty[examples if is_kept is None else examples[is_kept[examples]]]

    @functools.cached_property
    def _fingerprint(self) -> str:
        pacing = "\n".join(pacing_name(self.pacing))
        return digest(_canonical_bytes(self.difficulty), pacing.encode())


def _check_difficulty(difficulty: ArrayLike | DifficultyIndex) -> np.ndarray:
    if isinstance(difficulty, DifficultyIndex):
        # Without a global order, the position in the index defines the difficulty.
        is_global = difficulty.sorted_by == "all"
        return difficulty.difficulty if is_global else difficulty.ranks()
    try:
        array = np.asarray(difficulty)
    except ValueError:
        raise ValueError(
            "`difficulty` is ragged. Pass one number for each example, [N]."
        ) from None
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iuf":
        raise ValueError(
            f"`difficulty` is {array.dtype}{list(array.shape)}. Pass one number for "
            "each example, [N]."
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        bad = int(np.argmin(np.isfinite(array)))
        raise ValueError(
            f"`difficulty[{bad}]={array[bad]}` is not finite. Pass a finite number or "
            "leave the example out."
        )
    return array


def _canonical_bytes(difficulty: np.ndarray) -> bytes | memoryview:
    """Returns bytes that depend on the values but not on their dtype."""
    as_floats = np.ascontiguousarray(difficulty, "<f8")
    if difficulty.dtype.kind != "f" and np.any(abs(as_floats) >= _MAX_EXACT_FLOAT):
        # Some of these integers have no exact float.
        return "\n".join(map(str, difficulty.tolist())).encode()
    return as_floats.data
