"""Several datasets by weight, each of them with epochs of its own."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from jaxbucket.base.batch import EMPTY_ROW, BatchIndices
from jaxbucket.base.checks import check_accumulate, check_choice
from jaxbucket.schedule.example_draws import BatchDraws
from jaxbucket.schedule.schedule import BatchSchedule, Schedule

Unit: TypeAlias = Literal["steps", "tokens", "examples"]

_MAX_PERIOD = 2**16
_MAX_ERROR = 0.05


class Mixture(Schedule):
    """Steps of several schedules, each as often as its weight says.

    A batch is of one component. Its steps are those of its own schedule, one after the
    other: every example once in each of its epochs, in its own order. Which component
    a step takes is fixed: after any number of steps each has had its share to within
    one step, and so over any window of steps to within two.

    Example:
      >>> from jaxbucket import Bucket, BucketPlan
      >>> plan = BucketPlan((Bucket(1, 8),), max_tokens=8)
      >>> large = BatchSchedule(plan, [8] * 6, order="source")
      >>> small = BatchSchedule(plan, [8] * 2, order="source")
      >>> mixture = Mixture([large, small], weights=[2, 1])
      >>> [int(mixture[step].rows[0]) for step in range(9)]
      [0, 6, 1, 2, 7, 3, 4, 6, 5]

    Rows count through all components: those of the second one begin where the first
    one ends, as in `concatenate(sources)`.

    Attributes:
      schedules: the components, of one plan.
      weights: a positive number for each. Shares that are not in proportion of small
        integers are rounded to parts of 2**16 of all steps, and it is these that are
        held; what that would change by more than 5% is refused.
      by: what is in proportion to them in the long run: "steps", real "tokens" or
        "examples". Batches with the same budget make steps and tokens nearly the same.
      accumulate: micro-batches of a step. If the components have them, those are taken
        whole; if not, a step has so many of the mixture's, one after another.

    Raises:
      ValueError: if the components are no `BatchSchedule`s, or have other plans or
        micro-batches; for weights that are not positive and finite, or too small; or
        `by` other than steps where a component draws with replacement.
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
        self.weights = [
            _to_float(index, weight) for index, weight in enumerate(weights)
        ]
        self.by: Unit = by
        self._check()
        self.plan = self.schedules[0].plan
        segments = [own.max_segments for own in self.schedules]
        self.max_segments = max((n for n in segments if n is not None), default=None)
        self.lengths = np.concatenate([own.lengths for own in self.schedules])
        self._starts = [
            0,
            *itertools.accumulate(len(s.lengths) for s in self.schedules),
        ]
        self._turns_per_step = self._group(check_accumulate(accumulate))
        self._turns = Turns([self._share(i) for i in range(len(self.schedules))])

    def _check(self) -> None:
        if not self.schedules or len(self.schedules) != len(self.weights):
            raise ValueError(
                f"`weights` has {len(self.weights)} entries for {len(self.schedules)} "
                "schedules. Give one for each, and at least one."
            )
        for index, own in enumerate(self.schedules):
            if not isinstance(own, BatchSchedule):
                raise ValueError(
                    f"`schedules[{index}]` is a {type(own).__name__}, not a "
                    "`BatchSchedule`. Mix the components of a mixture directly."
                )
        for index, weight in enumerate(self.weights):
            if not 0 < weight < math.inf:
                raise ValueError(
                    f"`weights[{index}]={weight}` must be positive and finite. Leave "
                    "the component out if it has no share."
                )
        if any(own.capacities for own in self.schedules):
            raise ValueError(
                "`schedules` are of examples with several sequences, which are not "
                "mixed: concatenate the sources and pack all of their lengths."
            )
        if len({own.plan.fingerprint for own in self.schedules}) > 1:
            raise ValueError(
                "`schedules` have different plans. Plan once, for the lengths of all "
                "components together, and give every schedule this plan."
            )

        if len({own.packing is None for own in self.schedules}) > 1:
            raise ValueError(
                "`schedules` have packed rows, and rows of one example: pack all of "
                "them, or none."
            )

    def _group(self, accumulate: int) -> int:
        """Sets `accumulate`, and returns how many turns a step has."""
        own = sorted({schedule.accumulate for schedule in self.schedules})
        if len(own) > 1 or (own[0] > 1 and accumulate > 1):
            raise ValueError(
                f"`schedules` have `accumulate` of {own}, and the mixture has "
                f"{accumulate}. Let either the mixture accumulate, or all components "
                "alike."
            )
        self.accumulate = max(own[0], accumulate)
        return accumulate

    def _share(self, index: int) -> Fraction:
        """What a component has of all turns, up to a common factor."""
        schedule = self.schedules[index]
        # As it was written: 7/10 for 0.7.
        weight = Fraction(repr(self.weights[index]))
        if self.by == "steps":
            return weight
        epoch = schedule.cost()
        per_epoch = (
            epoch.real_tokens
            if self.by == "tokens"
            else epoch.packed_examples or epoch.examples
        )
        return weight * len(schedule) / per_epoch

    @property
    def steps_per_epoch(self) -> int:
        """Steps until every component has been through its own epoch."""
        turns = max(
            self._turns.until(index, len(schedule))
            for index, schedule in enumerate(self.schedules)
        )
        return -(-turns // self._turns_per_step)

    def __repr__(self) -> str:
        return f"Mixture({self.schedules}, weights={self.weights}, by={self.by!r})"

    def component_at(self, step: int) -> int:
        """Returns which component a step takes, the first one if it accumulates.

        Raises:
          IndexError: if `step` is negative, or before `first_step`.
        """
        turn = (self._checked(step) - self.first_step) * self._turns_per_step
        return self._turns.at(turn)[0]

    def _micro_batches(self, step: int) -> tuple[BatchIndices, ...]:
        return tuple(x for turn in self._turns_of(step) for x in self._of_turn(turn))

    def _draws(self, step: int) -> tuple[BatchDraws, ...]:
        # By seeds and epochs of the components; rows count through all of them, so
        # that no two share an index.
        turns = (self._turns.at(turn) for turn in self._turns_of(step))
        return tuple(x for i, own in turns for x in self.schedules[i]._draws(own))

    def _turns_of(self, step: int) -> range:
        first = step * self._turns_per_step
        return range(first, first + self._turns_per_step)

    def _of_turn(self, turn: int) -> list[BatchIndices]:
        index, own_step = self._turns.at(turn)
        start = self._starts[index]
        return [
            BatchIndices(x.bucket, self._through(x.rows, start))
            for x in self.schedules[index]._micro_batches(own_step)
        ]

    def _through(self, rows: np.ndarray, start: int) -> np.ndarray:
        """Rows as they count through all components; packed ones as wide as any."""
        rows = np.where(rows < 0, EMPTY_ROW, rows + start)
        if self.max_segments is None:
            return rows
        more = self.max_segments - rows.shape[1]
        return np.pad(rows, ((0, 0), (0, more)), constant_values=EMPTY_ROW)

    def traits(self) -> dict[str, Any]:
        return {
            "mixture": [schedule.traits() for schedule in self.schedules],
            "sizes": [len(schedule.lengths) for schedule in self.schedules],
            "weights": self.weights,
            "by": self.by,
            "accumulate": self.accumulate,
        }

    def _named(self) -> list[str]:
        own = [schedule.fingerprint for schedule in self.schedules]
        weights = [weight.hex() for weight in self.weights]
        return ["mixture", *own, *weights, self.by, str(self.accumulate)]


def _to_float(index: int, weight: Any) -> float:
    try:
        return float(weight)
    except (TypeError, ValueError):
        raise ValueError(f"`weights[{index}]={weight!r}` is no number.") from None


class Turns:
    """Whose turn it is, in proportion to shares, as evenly as can be.

    After any number of turns each has had its share to within
    `1 - 1 / (2 * n - 2)` of a turn, where n is their number (Tijdeman, "The chairman
    assignment problem", Discrete Mathematics 1980). They repeat after a period, and
    that is all that is kept.

    Example:
      >>> turns = Turns([Fraction(2), Fraction(1), Fraction(1)])
      >>> [turns.at(turn) for turn in range(5)]
      [(0, 0), (1, 0), (2, 0), (0, 1), (0, 2)]

    Args:
      shares: positive; rounded to parts of 2**16 unless so many make them exact.

    Attributes:
      parts: `[n]` int64, how many turns of a period each has.
      period: the sum of these.

    Raises:
      ValueError: if rounding changes a share by more than 5%.
    """

    def __init__(self, shares: Sequence[Fraction]):
        self.parts = _parts(shares)
        self.period = int(self.parts.sum())
        who = _chairmen(self.parts)
        self._who = who.astype(np.uint16)
        # Stably, so that each one's turns stay in order.
        turns = np.argsort(who, kind="stable")
        self._of_each = np.split(turns, np.cumsum(self.parts)[:-1])
        self._before = np.empty(self.period, np.int64)
        for own in self._of_each:
            self._before[own] = np.arange(len(own))

    def at(self, turn: int) -> tuple[int, int]:
        """Returns whose turn it is, and how many it has had before."""
        periods, turn = divmod(turn, self.period)
        who = int(self._who[turn])
        return who, periods * int(self.parts[who]) + int(self._before[turn])

    def until(self, who: int, count: int) -> int:
        """Returns how many turns there are until one has had so many, 1 at least."""
        periods, last = divmod(count - 1, int(self.parts[who]))
        return periods * self.period + int(self._of_each[who][last]) + 1


def _parts(shares: Sequence[Fraction]) -> np.ndarray:
    """The shares as whole numbers, `[n]`, that have no common factor if exact."""
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
                f"which cannot be rounded to within {_MAX_ERROR:.0%}. Give it more, "
                "leave it out, or choose weights that are in proportion of small "
                "integers."
            )
    return np.array([round(share) for share in exact])


def _chairmen(parts: np.ndarray) -> np.ndarray:
    """Tijdeman's algorithm, for one period: `[period]`, whose turn it is."""
    period, most = int(parts.sum()), max(2 * len(parts) - 2, 1)
    who = np.zeros(period, np.int64)
    # How far each is behind what it is due, in parts of a period.
    due = np.zeros(len(parts), np.int64)
    for turn in range(period):
        due += parts
        # Of those that are due, the one whose time would be over first.
        left = ((most - 1) * period - most * due) / parts
        who[turn] = np.argmin(np.where(most * due >= period, left, np.inf))
        due[who[turn]] -= period
    return who
