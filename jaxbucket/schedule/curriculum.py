"""Curricula: orders from easy to hard, with a pacing function that unlocks examples."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.digest import digest
from jaxbucket.schedule.difficulty_index import DifficultyIndex
from jaxbucket.schedule.metric import Metric, OpenExamples
from jaxbucket.schedule.orders import EpochOrder, Order
from jaxbucket.schedule.paced_order import OpenDraws, PacedOrder
from jaxbucket.schedule.pacing import LinearPacing, Pacing

Difficulty: TypeAlias = ArrayLike | DifficultyIndex


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
      >>> from jaxbucket.schedule import ByValue
      >>> plan = BucketPlan((Bucket(2, 8),), max_tokens=16)
      >>> order = Curriculum([5, 1, 4, 2, 3, 6], LinearPacing(start=0.3))
      >>> for batch in BatchSchedule(plan, [8] * 6, order=order):
      ...     print(sorted(batch.rows.tolist()))
      [1, 3]
      [2, 4]
      [0, 5]

      Short examples come first, by value, and of these the least rare ones:

      >>> in_two_steps = LinearPacing(start=0, duration=2, unit="steps")
      >>> order = Curriculum(
      ...     {"length": [8, 3, 5, 7], "rarity": [0.1, 0.3, 0.9, 0.4]},
      ...     {
      ...         "length": ByValue(in_two_steps, low=5, high=8),
      ...         "rarity": LinearPacing(start=0.5, duration=2, unit="steps"),
      ...     },
      ... )
      >>> [sorted(x.rows.tolist()) for x in BatchSchedule(plan, [8] * 4, order=order)]
      [[1, 3], [0, 2]]

    With several metrics, an example is open when all of them open it. Batches are
    completed with the examples that open next in this epoch. Even if nothing is open,
    the easiest examples are.

    With packed rows, examples that are about as difficult share rows. A row is open
    when all of its examples are, and as difficult as its hardest one.

    Args:
      difficulty: `[N]` finite numbers, one per example, or a `DifficultyIndex`. For
        several metrics, name -> such numbers. The arrays are not copied, so do not
        modify them afterwards.
      pacing: a function from the number of completed epochs to the share of examples
        that is open, from 0 to 1; by default `LinearPacing()`. The share may fall, for
        example in cycles. A function with an attribute `unit`, "steps" or "tokens",
        gets the number of completed steps, or of real tokens if every step had the
        mean of an epoch. `ByValue` opens difficulties up to a value in place of a
        share. For several metrics, name -> a function, or one function for all
        of them. A schedule that a `JoinedSchedule` starts later counts its own
        epochs, steps and tokens.
      replacement: whether every step draws from all open examples, as described above.

    Attributes:
      difficulty: `[N]` numbers; name -> `[N]` if a mapping was passed.
      pacing: the pacing function, or name -> pacing function.
      replacement: as above.

    Raises:
      ValueError: if `difficulty` is empty, not `[N]` or not finite; if `pacing` is not
        callable, has an unknown unit, or does not have the names of `difficulty`; or if
        it is a `ByValue` that opens no example.
    """

    def __init__(
        self,
        difficulty: Difficulty | Mapping[str, Difficulty],
        pacing: Pacing | Mapping[str, Pacing] | None = None,
        *,
        replacement: bool = False,
    ):
        self.pacing = LinearPacing() if pacing is None else pacing
        self._metrics = _metrics(difficulty, self.pacing)
        values = [metric.values for metric in self._metrics]
        self.difficulty: Any = values[0]
        if isinstance(difficulty, Mapping):
            self.difficulty = dict(zip(difficulty, values, strict=True))
        self.replacement = bool(replacement)

    def __repr__(self) -> str:
        metrics = ""
        if isinstance(self.difficulty, dict):
            metrics = f"{', '.join(self.difficulty)} of "
        return (
            f"Curriculum({metrics}{len(self._metrics[0].values)} examples, "
            f"{self.pacing}, replacement={self.replacement})"
        )

    def __str__(self) -> str:
        """Returns a name that identifies the difficulties and the options."""
        kind = "curriculum with replacement" if self.replacement else "curriculum"
        return f"{kind} {self._fingerprint[:16]}"

    def check(self, num_examples: int) -> None:
        for metric in self._metrics:
            if len(metric.values) != num_examples:
                raise ValueError(
                    f"`{metric.name}` has {len(metric.values)} entries for "
                    f"{num_examples} lengths. Pass one difficulty for each example."
                )

    def slot_difficulty(self, is_kept: np.ndarray | None) -> np.ndarray:
        return np.maximum.reduce([metric.ranks(is_kept)[0] for metric in self._metrics])

    def epoch_order(self, rows, lengths, seed, first) -> EpochOrder:
        opened = OpenExamples(self._metrics, rows)
        if self.replacement:
            return OpenDraws(opened, rows, seed)
        return PacedOrder(opened, rows, seed, first)

    @functools.cached_property
    def _fingerprint(self) -> str:
        # The order and the names of metrics make no difference to the batches.
        parts = sorted(metric.fingerprint for metric in self._metrics)
        return parts[0] if len(parts) == 1 else digest("\n".join(parts).encode())


def _metrics(difficulty: Any, pacing: Any) -> list[Metric]:
    if not isinstance(difficulty, Mapping) and not isinstance(pacing, Mapping):
        return [Metric("difficulty", difficulty, pacing)]
    if not isinstance(pacing, Mapping):
        pacing = dict.fromkeys(difficulty, pacing)
    names = list(difficulty) if isinstance(difficulty, Mapping) else []
    if not names or set(pacing) != set(names):
        raise ValueError(
            f"`pacing` has the keys {list(pacing)}, but `difficulty` has {names}. Pass "
            "mappings with the same names, at least one, or a single pacing function."
        )
    return [
        Metric(f"difficulty[{name!r}]", values, pacing[name])
        for name, values in difficulty.items()
    ]
