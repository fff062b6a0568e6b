"""Mixtures of several schedules by weight, each with its own epochs."""

from __future__ import annotations

import functools
import itertools
import math
import numbers
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from jaxbucket.base.batch import EMPTY_ROW, BatchIndices
from jaxbucket.base.checks import (
    check_accumulate,
    check_choice,
    check_integer,
    check_positive,
)
from jaxbucket.plan.reports.epoch import Report
from jaxbucket.schedule.base import Schedule
from jaxbucket.schedule.batch_schedule import BatchSchedule
from jaxbucket.schedule.example_draws import BatchDraws
from jaxbucket.schedule.mixture_report import ComponentReport, MixtureReport
from jaxbucket.schedule.turns import Turns

StepWeights: TypeAlias = Sequence[float] | Mapping[str, float]
# The weights of all steps, or step -> the weights from this step on.
Weights: TypeAlias = StepWeights | Mapping[int, StepWeights]
Unit: TypeAlias = Literal["steps", "tokens", "examples"]


class ComponentBatch(NamedTuple):
    """A batch of one component of a mixture.

    Attributes:
      component: the index of the component.
      indices: the bucket, and the rows as the component itself numbers its
        examples.
      draws: the random numbers for the examples.
    """

    component: int
    indices: BatchIndices
    draws: BatchDraws


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

      The small component only comes in after three steps:

      >>> weights = {0: {"large": 1}, 3: {"large": 1, "small": 1}}
      >>> mixture = Mixture({"large": large, "small": small}, weights)
      >>> [mixture.name_at(step) for step in range(7)]
      ['large', 'large', 'large', 'large', 'small', 'large', 'small']

    Rows are numbered over all components: the rows of the second component start where
    the first one ends, as in `concatenate(sources)`. The examples of components with
    names come from a source for each: `MeshLoader({"large": ..., "small": ...},
    mixture, mesh)`. These may have different features, sequences and numbers of
    examples per row, also within a step of several micro-batches.

    Attributes:
      schedules: the components, in a list, or in a mapping from names. Each has plans
        of its own. They may be mixtures without names and joined schedules, too.
      names: the names of the components; empty if `schedules` is a list.
      weights: a positive number for each component, in a list or by name. Weights whose
        exact ratio would take a period of more than 2**16 turns are rounded to
        multiples of 2**-16 of all turns. A weight that rounding would change by more
        than 5% is refused. To change the weights during the run, pass a mapping from
        step to weights, which starts with step 0. Then weights may be 0 at some steps,
        and the shares above are those since the last change.
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
      ValueError: if a component is not a schedule, or has names; if the components
        differ in `accumulate` or, without names, in their sequences or in whether rows
        are packed; if a weight is negative, not finite or too small; if steps of
        weights do not start at 0 or are not ascending; if `by` is not "steps" and a
        component is not a `BatchSchedule`, or draws with replacement.
    """

    def __init__(
        self,
        schedules: Sequence[Schedule] | Mapping[str, Schedule],
        weights: Weights,
        *,
        by: Unit = "steps",
        accumulate: int = 1,
    ):
        check_choice("by", by, get_args(Unit))
        if isinstance(schedules, Mapping):
            self.names = tuple(schedules)
            schedules = list(schedules.values())
        self.schedules = list(schedules)
        self.by: Unit = by
        self._check()
        steps = _weights(weights, self.names, len(self.schedules))
        self.weights = steps if len(steps) > 1 else steps[0]
        plans = [plan for x in self.schedules for plan in x.plans]
        self.plans = tuple({plan.fingerprint: plan for plan in plans}.values())
        if not self.names:
            self.check_policies()
        segments = [x.max_segments for x in self.schedules if x.max_segments]
        self.max_segments = max(segments, default=None)
        self.lengths = np.concatenate([x.lengths for x in self.schedules])
        self.parts = self._join_parts()
        sizes = [len(x.lengths) for x in self.schedules]
        self._starts = [0, *itertools.accumulate(sizes)]
        self._turns_per_step = self._group(check_accumulate(accumulate))
        shares = [
            [self._share(index, weight) for index, weight in enumerate(values)]
            for values in steps.values()
        ]
        self._turns = Turns([x * self._turns_per_step for x in steps], shares)

    def _check(self) -> None:
        """Checks that the components are schedules whose rows fit together."""
        if not self.schedules or not all(isinstance(x, str) for x in self.names):
            raise ValueError(
                f"`schedules` has the components {list(self.names)}. Pass at least "
                "one, in a list or by a name that is a string."
            )
        for index, schedule in enumerate(self.schedules):
            if not isinstance(schedule, Schedule) or schedule.names:
                raise ValueError(
                    f"`schedules[{self._key(index)!r}]` is a "
                    f"{type(schedule).__name__}. Pass a `BatchSchedule` or another "
                    "schedule without names."
                )
        kinds = {(x.sequences, x.max_segments is None) for x in self.schedules}
        if len(kinds) > 1 and not self.names:
            raise ValueError(
                "`schedules` have both packed rows and rows of one example, or "
                "different sequences. Pass a mapping from names to schedules, and one "
                "from names to sources to the loader."
            )

    def _key(self, index: int) -> str | int:
        return self.names[index] if self.names else index

    def _join_parts(self) -> dict[str, np.ndarray] | None:
        """Returns the lengths of each sequence, if all components have the same."""
        columns = [x.parts or {} for x in self.schedules]
        names = {tuple(parts) for parts in columns}
        if len(names) > 1 or not columns[0]:
            return None
        return {
            name: np.concatenate([parts[name] for parts in columns])
            for name in columns[0]
        }

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

    def _share(self, index: int, weight: float) -> Fraction:
        """Returns the share of a component in all turns, up to a common factor."""
        # The decimal that the user wrote, 7/10 for 0.7, for a short period.
        share = Fraction(repr(weight))
        if self.by == "steps" or not share:
            return share
        epoch = self._cost(index)
        per_epoch = epoch.real_tokens
        if self.by == "examples":
            per_epoch = epoch.packed_examples or epoch.examples
        return share * len(self.schedules[index]) / per_epoch

    def _cost(self, index: int) -> Report:
        """Returns the cost of an epoch of a component."""
        schedule = self.schedules[index]
        if not isinstance(schedule, BatchSchedule):
            raise ValueError(
                f"`schedules[{self._key(index)!r}]` is a {type(schedule).__name__}, "
                "whose epochs differ. A report, and a `by` other than 'steps', require "
                "a `BatchSchedule`."
            )
        return schedule.cost()

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps until every component has completed its own epoch.

        Components whose weight is 0 from some step on, and that do not complete an
        epoch before, do not count.
        """
        return self._steps_per_epoch

    @functools.cached_property
    def _steps_per_epoch(self) -> int:
        turns = [
            self._turns.until(index, len(schedule))
            for index, schedule in enumerate(self.schedules)
        ]
        return -(-max(x for x in turns if x is not None) // self._turns_per_step)

    def __repr__(self) -> str:
        schedules = self.schedules
        if self.names:
            schedules = dict(zip(self.names, schedules, strict=True))
        return f"Mixture({schedules}, weights={self.weights}, by={self.by!r})"

    def name_at(self, step: int) -> str | int:
        """Returns the name of the component that a step comes from, or its index.

        If a step has batches of several components, returns that of the first batch.

        Args:
          step: the step, counted over all epochs.

        Raises:
          IndexError: if `step` is negative.
        """
        return self._key(self.component_batches(step)[0].component)

    def component_batches(self, step: int) -> list[ComponentBatch]:
        """Returns the micro-batches of a step, with the rows of the components.

        Args:
          step: the step, counted over all epochs.

        Raises:
          IndexError: if `step` is negative.
        """
        return [
            ComponentBatch(
                index, indices, draws._replace(first_example=self._starts[index])
            )
            for index, number in self._components(step)
            for indices, draws in zip(
                self.schedules[index].micro_batches(number),
                self.schedules[index].draws(number),
                strict=True,
            )
        ]

    def report(self, num_steps: int | None = None) -> MixtureReport:
        """Returns the steps, epochs, examples and tokens of each component.

        Example:
          >>> from jaxbucket import plan_buckets
          >>> long = BatchSchedule(plan_buckets([8], max_tokens=8), [8] * 4)
          >>> short = BatchSchedule(plan_buckets([2] * 8, max_tokens=8), [2] * 8)
          >>> mixture = Mixture({"long": long, "short": short}, {"long": 3, "short": 1})
          >>> [(x.steps, x.examples) for x in mixture.report(num_steps=8).components]
          [(6, 6.0), (2, 8.0)]

        Args:
          num_steps: the number of steps from step 0; by default those of one
            epoch.

        Returns:
          The numbers; those of examples and tokens are means if an epoch is incomplete.

        Raises:
          ValueError: if `num_steps` is not positive, or a component is not a
            `BatchSchedule` or draws with replacement.
        """
        num_steps = self.steps_per_epoch if num_steps is None else num_steps
        check_positive("num_steps", num_steps)
        turns = num_steps * self._turns_per_step
        components = (
            ComponentReport.of(
                str(self._key(index)),
                self._cost(index),
                self._turns.before(index, turns),
                len(schedule),
            )
            for index, schedule in enumerate(self.schedules)
        )
        return MixtureReport(num_steps, tuple(components))

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
        if self.max_segments is None or rows.ndim == 1:
            return rows
        return pad_segments(rows, self.max_segments)

    def config(self) -> dict[str, Any]:
        weights = self.weights
        if isinstance(weights, dict):
            weights = {str(step): x for step, x in weights.items()}
        return {
            "mixture": [x.config() | {"of": x.fingerprint} for x in self.schedules],
            "names": list(self.names),
            "weights": weights,
            "by": self.by,
            "accumulate": self.accumulate,
        }


def _weights(
    weights: Weights, names: Sequence[str], count: int
) -> dict[int, list[float]]:
    """Returns step -> the weights of all components from this step on.

    Example:
      >>> _weights({0: {"a": 1}, 500: {"a": 0.5, "b": 0.5}}, ["a", "b"], 2)
      {0: [1.0, 0.0], 500: [0.5, 0.5]}
    """
    by_step: Any = {0: weights}
    # Names are strings.
    if isinstance(weights, Mapping) and any(not isinstance(x, str) for x in weights):
        by_step = weights
    steps = [check_integer("weights", step) for step in by_step]
    if steps != sorted({0, *steps}):
        raise ValueError(
            f"`weights` has the steps {steps}. Start with step 0, in ascending order."
        )
    result = {step: _listed(by_step[step], names, count) for step in steps}
    for index, key in enumerate(names or range(count)):
        if not any(values[index] for values in result.values()):
            raise ValueError(
                f"`weights` gives {key!r} no share at any step. Pass a positive one, "
                "or leave the component out."
            )
    return result


def _listed(weights: Any, names: Sequence[str], count: int) -> list[float]:
    """Returns the weights of all components at some steps."""
    if names:
        if not isinstance(weights, Mapping) or not weights.keys() <= set(names):
            raise ValueError(
                f"`weights` has {weights!r} for components with the names "
                f"{list(names)}. Pass a mapping from these names."
            )
        weights = [weights.get(name, 0) for name in names]
    if not isinstance(weights, Sequence | np.ndarray) or len(weights) != count:
        raise ValueError(
            f"`weights` has {weights!r} for {count} components. Pass one number for "
            "each."
        )
    for weight in weights:
        is_number = isinstance(weight, numbers.Real) and not isinstance(weight, bool)
        if not is_number or not 0 <= float(weight) < math.inf:
            raise ValueError(
                f"`weights` has {weight!r}. Pass finite numbers that are not negative."
            )
    if not any(weights):
        raise ValueError("`weights` gives no component a share. Pass a positive one.")
    return [float(weight) for weight in weights]


def pad_segments(rows: np.ndarray, max_segments: int) -> np.ndarray:
    """Returns packed rows `[B, S]` as `[B, max_segments]`, followed by -1."""
    missing = max_segments - rows.shape[1]
    return np.pad(rows, ((0, 0), (0, missing)), constant_values=EMPTY_ROW)
