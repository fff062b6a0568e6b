"""Mixtures of several schedules by weight, each with its own epochs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from jaxbucket.base.batch import EMPTY_ROW, BatchIndices
from jaxbucket.base.checks import check_accumulate, check_choice
from jaxbucket.schedule.base import Schedule
from jaxbucket.schedule.batch_schedule import BatchSchedule
from jaxbucket.schedule.example_draws import BatchDraws

Unit: TypeAlias = Literal["steps", "tokens", "examples"]

_MAX_PERIOD = 2**16
_MAX_ERROR = 0.05


class Mixture(Schedule):
    """A schedule that takes its steps from several schedules, in proportion to weights.

    Every batch comes from one component. A component takes the steps of its own
    schedule one after the other, so it keeps its own order, and each of its epochs has
    every example once. The sequence of components is fixed: after any number of steps,
    the number of steps of a component differs from its share by at most one. Hence it
    differs by at most two in any window of steps.

    Example:
      >>> from jaxbucket import Bucket, BucketPlan
      >>> plan = BucketPlan((Bucket(1, 8),), max_tokens=8)
      >>> large = BatchSchedule(plan, [8] * 6, order="source")
      >>> small = BatchSchedule(plan, [8] * 2, order="source")
      >>> mixture = Mixture([large, small], weights=[2, 1])
      >>> [int(mixture[step].rows[0]) for step in range(9)]
      [0, 6, 1, 2, 7, 3, 4, 6, 5]

    Rows are numbered over all components: the rows of the second component start where
    the first one ends, as in `concatenate(sources)`.

    Attributes:
      schedules: the components, which must share one plan.
      weights: a positive number for each component. Weights whose exact ratio would
        take a period of more than 2**16 turns are rounded to multiples of 2**-16 of
        all turns. A weight that rounding would change by more than 5% is refused.
      by: the quantity that is proportional to the weights in the long run: "steps",
        real "tokens" or "examples". If all batches have about the same token budget,
        "steps" and "tokens" are nearly the same.
      accumulate: the number of micro-batches in a step. If the components already
        accumulate, their steps are taken as they are. Otherwise a step consists of
        `accumulate` consecutive batches of the mixture. With the order "spread", these
        may all have the same bucket, for a whole run: components with equally many
        batches of each bucket keep in step. For steps with several buckets, create
        components with `accumulate` and `group="mixed"` instead.

    Raises:
      ValueError: if a component is not a `BatchSchedule`; if the components differ in
        their plan or in `accumulate`; if a weight is not positive and finite, or is too
        small; if `by` is not "steps" and a component draws with replacement.
    """

    def __init__(
        self,
        schedules: Sequence[BatchSchedule],
        weights: Sequence[float],
        *,
        by: Unit = "steps",
        accumulate: int = 1,
    ):
        check_choice("by", by, get_args(Unit))
        self.schedules = list(schedules)
        self.weights = [_to_float(index, x) for index, x in enumerate(weights)]
        self.by: Unit = by
        self._check()
        self.plan = self.schedules[0].plan
        segments = [x.max_segments for x in self.schedules if x.max_segments]
        self.max_segments = max(segments, default=None)
        self.lengths = np.concatenate([x.lengths for x in self.schedules])
        columns = [x.parts for x in self.schedules if x.parts is not None]
        if columns:
            self.parts = {
                name: np.concatenate([parts[name] for parts in columns])
                for name in columns[0]
            }
        sizes = [len(x.lengths) for x in self.schedules]
        self._starts = [0, *itertools.accumulate(sizes)]
        self._turns_per_step = self._group(check_accumulate(accumulate))
        self._turns = Turns([self._share(i) for i in range(len(self.schedules))])

    def _check(self) -> None:
        if not self.schedules or len(self.schedules) != len(self.weights):
            raise ValueError(
                f"`weights` has {len(self.weights)} entries for {len(self.schedules)} "
                "schedules. Pass at least one schedule, and one weight for each."
            )
        for index, schedule in enumerate(self.schedules):
            if not isinstance(schedule, BatchSchedule):
                raise ValueError(
                    f"`schedules[{index}]` is a {type(schedule).__name__}, not a "
                    "`BatchSchedule`. Instead of a mixture, pass its components."
                )
        for index, weight in enumerate(self.weights):
            if not 0 < weight < math.inf:
                raise ValueError(
                    f"`weights[{index}]={weight}` must be positive and finite. Leave "
                    "out components that have no share."
                )
        if len({x.plan.fingerprint for x in self.schedules}) > 1:
            raise ValueError(
                "`schedules` have different plans. Plan once for the lengths of all "
                "components together, and pass this plan to every schedule."
            )
        if len({x.packing is None for x in self.schedules}) > 1:
            raise ValueError(
                "`schedules` have both packed rows and rows of one example. Pack all "
                "components or none."
            )

    def _group(self, accumulate: int) -> int:
        """Sets `accumulate` and returns the number of turns in a step."""
        numbers = sorted({schedule.accumulate for schedule in self.schedules})
        if len(numbers) > 1 or (numbers[0] > 1 and accumulate > 1):
            raise ValueError(
                f"`schedules` have `accumulate` of {numbers}, and the mixture has "
                f"{accumulate}. Set `accumulate` only for the mixture, or the same "
                "number for each component."
            )
        self.accumulate = max(numbers[0], accumulate)
        return accumulate

    def _share(self, index: int) -> Fraction:
        """Returns the share of a component in all turns, up to a common factor."""
        schedule = self.schedules[index]
        # The decimal that the user wrote, 7/10 for 0.7, gives a short period.
        weight = Fraction(repr(self.weights[index]))
        if self.by == "steps":
            return weight
        epoch = schedule.cost()
        per_epoch = epoch.real_tokens
        if self.by == "examples":
            per_epoch = epoch.packed_examples or epoch.examples
        return weight * len(schedule) / per_epoch

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps until every component has completed its own epoch."""
        turns = max(
            self._turns.until(index, len(schedule))
            for index, schedule in enumerate(self.schedules)
        )
        return -(-turns // self._turns_per_step)

    def __repr__(self) -> str:
        return f"Mixture({self.schedules}, weights={self.weights}, by={self.by!r})"

    def component_at(self, step: int) -> int:
        """Returns the index of the component that a step comes from.

        If a step has batches of several components, returns that of the first batch.

        Args:
          step: the step, counted over all epochs.

        Raises:
          IndexError: if `step` is negative or before `first_step`.
        """
        turn = (self._check_step(step) - self.first_step) * self._turns_per_step
        return self._turns.at(turn)[0]

    def _micro_batches(self, step: int) -> tuple[BatchIndices, ...]:
        return tuple(
            BatchIndices(x.bucket, self._shift_rows(x.rows, self._starts[index]))
            for index, component_step in self._components(step)
            for x in self.schedules[index]._micro_batches(component_step)
        )

    def _draws(self, step: int) -> tuple[BatchDraws, ...]:
        # Seeds and epochs are those of the components. Draws still differ between
        # components, because rows are numbered over all of them.
        return tuple(
            x
            for index, component_step in self._components(step)
            for x in self.schedules[index]._draws(component_step)
        )

    def _components(self, step: int) -> list[tuple[int, int]]:
        """Returns (component, step of the component) for each turn of a step."""
        first = step * self._turns_per_step
        return [self._turns.at(first + i) for i in range(self._turns_per_step)]

    def _shift_rows(self, rows: np.ndarray, start: int) -> np.ndarray:
        """Returns rows numbered over all components, padded to `max_segments`."""
        rows = np.where(rows < 0, EMPTY_ROW, rows + start)
        if self.max_segments is None:
            return rows
        missing = self.max_segments - rows.shape[1]
        return np.pad(rows, ((0, 0), (0, missing)), constant_values=EMPTY_ROW)

    def config(self) -> dict[str, Any]:
        return {
            "mixture": [schedule.config() for schedule in self.schedules],
            "sizes": [len(schedule.lengths) for schedule in self.schedules],
            "weights": self.weights,
            "by": self.by,
            "accumulate": self.accumulate,
        }

    def _fingerprint_parts(self) -> list[str]:
        names = [schedule.fingerprint for schedule in self.schedules]
        weights = [weight.hex() for weight in self.weights]
        return ["mixture", *names, *weights, self.by, str(self.accumulate)]


def _to_float(index: int, weight: Any) -> float:
    try:
        return float(weight)
    except (TypeError, ValueError):
        raise ValueError(
            f"`weights[{index}]={weight!r}` is not a number. Pass a positive one."
        ) from None


class Turns:
    """A periodic sequence of turns, spread as evenly as the shares allow.

    After any number of turns each of the n members has had its share to within
    `1 - 1 / (2 * n - 2)` of a turn (Tijdeman, "The chairman assignment problem",
    Discrete Mathematics 1980). Only one period of the sequence is stored.

    Example:
      >>> turns = Turns([Fraction(2), Fraction(1), Fraction(1)])
      >>> [turns.at(turn) for turn in range(5)]
      [(0, 0), (1, 0), (2, 0), (0, 1), (0, 2)]

    Args:
      shares: `[n]` positive numbers. They are rounded to multiples of 2**-16 of their
        sum if an exact period would be longer than 2**16 turns.

    Attributes:
      parts: `[n]` int64, the turns of each member in a period.
      period: the sum of `parts`.

    Raises:
      ValueError: if rounding changes a share by more than 5%.
    """

    def __init__(self, shares: Sequence[Fraction]):
        self.parts = _parts(shares)
        self.period = int(self.parts.sum())
        members = _assign_turns(self.parts)
        self._members = members.astype(np.uint16)
        # A stable sort keeps the turns of each member in order.
        turns = np.argsort(members, kind="stable")
        self._turns_by_member = np.split(turns, np.cumsum(self.parts)[:-1])
        self._turns_before = np.empty(self.period, np.int64)
        for member_turns in self._turns_by_member:
            self._turns_before[member_turns] = np.arange(len(member_turns))

    def at(self, turn: int) -> tuple[int, int]:
        """Returns the member of a turn, and the number of its earlier turns."""
        periods, turn = divmod(turn, self.period)
        member = int(self._members[turn])
        before = int(self._turns_before[turn])
        return member, periods * int(self.parts[member]) + before

    def at_each(self, turns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the same as `at` for each of `[n]` turns."""
        periods, turns = np.divmod(turns, self.period)
        members = self._members[turns]
        return members, periods * self.parts[members] + self._turns_before[turns]

    def until(self, member: int, count: int) -> int:
        """Returns the number of turns after which a member has had `count` >= 1."""
        periods, last = divmod(count - 1, int(self.parts[member]))
        return periods * self.period + int(self._turns_by_member[member][last]) + 1


def _parts(shares: Sequence[Fraction]) -> np.ndarray:
    """Returns `[n]` integers proportional to the shares, rounded if necessary."""
    common = math.lcm(*(share.denominator for share in shares))
    whole = [int(share * common) for share in shares]
    whole = [number // math.gcd(*whole) for number in whole]
    total = sum(whole)
    if total <= _MAX_PERIOD:
        return np.array(whole)
    exact = [number * _MAX_PERIOD / total for number in whole]
    for index, share in enumerate(exact):
        if abs(round(share) - share) > _MAX_ERROR * share:
            raise ValueError(
                f"`weights`: component {index} has {share:.3g} of {_MAX_PERIOD} steps, "
                f"which cannot be rounded to within {_MAX_ERROR:.0%}. Raise its "
                "weight, leave the component out, or choose weights whose ratios are "
                "ratios of small integers."
            )
    return np.array([round(share) for share in exact])


def _assign_turns(parts: np.ndarray) -> np.ndarray:
    """Returns the member of each turn of one period, by Tijdeman's algorithm."""
    period, scale = int(parts.sum()), max(2 * len(parts) - 2, 1)
    members = np.zeros(period, np.int64)
    # How much each member has had too little so far, in units of 1 / period turns.
    deficit = np.zeros(len(parts), np.int64)
    for turn in range(period):
        deficit += parts
        # Among the members with a large enough deficit, the one with the earliest
        # deadline takes the turn.
        deadline = ((scale - 1) * period - scale * deficit) / parts
        members[turn] = np.argmin(np.where(scale * deficit >= period, deadline, np.inf))
        deficit[members[turn]] -= period
    return members
