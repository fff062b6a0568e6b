"""Mixtures of several schedules by weight, each with its own epochs."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np

from jaxbucket.base.batch import BatchIndices
from jaxbucket.base.checks import (
    by_step,
    check_accumulate,
    check_float,
    check_positive,
    check_type,
)
from jaxbucket.base.table import Record, number_table
from jaxbucket.schedule.base import Schedule, check_step
from jaxbucket.schedule.batch_schedule import BatchSchedule
from jaxbucket.schedule.combined import CombinedSchedule
from jaxbucket.schedule.example_draws import BatchDraws
from jaxbucket.schedule.spread import Turns

StepWeights: TypeAlias = Sequence[float] | Mapping[str, float]
# The least share of a component.
_LEAST_SHARE = 1e-12
# The weights of all steps, or step -> the weights from this step on.
Weights: TypeAlias = StepWeights | Mapping[int, StepWeights]


@dataclasses.dataclass(frozen=True)
class ComponentReport:
    """One component of a mixture over a number of steps.

    Attributes:
      name: its name, or its index.
      steps: the number of its steps, exactly; with `accumulate`, of its batches.
      epochs: the number of its epochs, of which the last may be incomplete.
      examples: the number of examples in these steps. If an epoch is incomplete, its
        examples are counted in proportion to its steps, as are its tokens.
      real_tokens: the number of tokens in these steps, without padding.
      padding: the share of padding in an epoch of the component.
    """

    name: str
    steps: int
    epochs: float
    examples: float
    real_tokens: float
    padding: float


@dataclasses.dataclass(frozen=True)
class MixtureReport(Record):
    """The components of a mixture over a number of steps.

    Attributes:
      num_steps: the number of steps of the mixture.
      components: the components.
    """

    num_steps: int
    components: tuple[ComponentReport, ...]

    @property
    def token_shares(self) -> list[float]:
        """The share of each component in the real tokens."""
        total = sum(component.real_tokens for component in self.components)
        return [component.real_tokens / total for component in self.components]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"token_shares": self.token_shares}

    def __rich__(self) -> Any:
        columns = ("", "steps", "epochs", "examples", "tokens", "share", "padding")
        rows = (
            (
                *(x.name, f"{x.steps:,}", f"{x.epochs:.2f}", f"{x.examples:,.0f}"),
                *(f"{x.real_tokens:,.0f}", f"{share:.1%}", f"{x.padding:.1%}"),
            )
            for x, share in zip(self.components, self.token_shares, strict=True)
        )
        caption = f"{self.num_steps:,} steps. Share: share of all tokens, not padding."
        return number_table(columns, rows, caption)


class Mixture(CombinedSchedule):
    """A schedule that takes its steps from several schedules, in proportion to weights.

    Every batch comes from one component. A component takes the steps of its own
    schedule one after the other, so it keeps its own order, and each of its epochs has
    every example once. The components are spread evenly: after any number of steps, the
    steps of a component differ from its share by less than two, and typically by less
    than one.

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
      ['large', 'large', 'large', 'small', 'large', 'small', 'large']

    Rows are numbered over all components: the rows of the second component start where
    the first one ends, as in `concatenate(sources)`. The examples of components with
    names come from a source for each: `MeshLoader({"large": ..., "small": ...},
    mixture, mesh)`. These may have different features, sequences and numbers of
    examples per row, also within a step of several micro-batches.

    Attributes:
      schedules: the components, in a list, or in a mapping from names. Each has plans
        of its own. They may be mixtures without names and joined schedules, too.
      names: the names of the components; empty if `schedules` is a list.
      weights: step -> the weights of all components from this step on, in their order.
        Pass a number for each component, in a list or by name; or, to change them
        during the run, a mapping from step to weights that starts with step 0. Then the
        shares above are those since the last change. Components go on where they were.
        A run that has begun resumes with another change at this or a later step.
        For shares of tokens in place of steps, multiply each weight by `len(schedule) /
        schedule.report().real_tokens`.
      accumulate: the number of micro-batches in a step. If the components already
        accumulate, their steps are taken as they are. Otherwise a step consists of
        `accumulate` consecutive batches of the mixture. With the order "spread", these
        may all have the same bucket, for a whole run: components with equally many
        batches of each bucket keep in step. For steps with several buckets, create
        components with `accumulate` and `group="mixed"` instead.

    Raises:
      ValueError: if a component is not a schedule, or has names; if the components
        differ in `accumulate` or, without names, in their sequences or in whether rows
        are packed or truncated; if a weight is negative or not finite, or none is
        positive; if steps of weights do not start at 0 or are not ascending.
    """

    def __init__(
        self,
        schedules: Sequence[Schedule] | Mapping[str, Schedule],
        weights: Weights,
        *,
        accumulate: int = 1,
    ):
        is_named = isinstance(schedules, Mapping)
        components = dict(schedules if is_named else enumerate(schedules))
        super().__init__(components, tuple(map(str, components)) if is_named else ())
        self.schedules = self._components
        self._keys = list(components)
        self.lengths = np.concatenate([x.lengths for x in self.schedules])
        self.parts = self._join_parts()
        sizes = [len(x.lengths) for x in self.schedules]
        self._first_rows = [0, *itertools.accumulate(sizes)][:-1]
        self._turns_per_step = accumulate = check_accumulate(accumulate)
        numbers = sorted({schedule.accumulate for schedule in self.schedules})
        if len(numbers) > 1 or (numbers[0] > 1 and accumulate > 1):
            raise ValueError(
                f"`schedules` have `accumulate` of {numbers}, the mixture {accumulate}."
                " Set it only for the mixture, or to the same for each component."
            )
        self.accumulate = max(numbers[0], accumulate)
        self._set_weights(self._by_step(weights))

    def _set_weights(self, weights: dict[int, list[float]]) -> None:
        """Sets the weights from each step on, and the sequence of components."""
        self.weights = weights
        # The decimal that the user wrote, 7/10 for 0.7.
        shares = [[Fraction(repr(x)) for x in row] for row in weights.values()]
        self._turns = Turns([x * self._turns_per_step for x in weights], shares)
        ends = [self._turns.until(i, len(x)) for i, x in enumerate(self.schedules)]
        last = max(x for x in ends if x is not None)
        self._steps_per_epoch = -(-last // self._turns_per_step)

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

    def _by_step(self, weights: Weights) -> dict[int, list[float]]:
        """Returns step -> the weights of all components from this step on."""
        values = by_step("weights", weights)
        return {step: self._listed(value) for step, value in values.items()}

    def _listed(self, weights: Any) -> list[float]:
        """Returns the weights of all components at some steps."""
        if self.names and isinstance(weights, Mapping):
            fits = weights.keys() <= set(self.names)
            weights = [weights.get(name, 0) for name in self.names]
        else:
            is_list = isinstance(weights, Sequence | np.ndarray)
            fits = not self.names and is_list and len(weights) == len(self._keys)
        if not fits:
            raise ValueError(
                f"`weights` has {weights!r} for the components {self._keys}. Pass one "
                "number for each: a mapping if they have names, and a list otherwise."
            )
        listed = [check_float("weights", weight, least=0) for weight in weights]
        least = min(filter(None, listed), default=0)
        if least <= _LEAST_SHARE * sum(listed):
            raise ValueError(
                f"`weights={listed}`: pass at least one positive number, and 0 for a "
                f"component whose share is at most {_LEAST_SHARE}."
            )
        return listed

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps until every component has completed its own epoch.

        Components whose weight is 0 from some step on, and that do not complete an
        epoch before, do not count.
        """
        return self._steps_per_epoch

    def before(self, step: int) -> Schedule:
        earlier = copy.copy(self)
        earlier._set_weights(
            {s: x for s, x in self.weights.items() if s < max(step, 1)}
        )
        return earlier

    def __repr__(self) -> str:
        schedules = dict(zip(self._keys, self.schedules, strict=True))
        return f"Mixture({schedules}, weights={self.weights})"

    def name_at(self, step: int) -> str | int:
        """Returns the name of the component that a step comes from, or its index.

        If a step has batches of several components, returns that of the first batch.

        Args:
          step: the step, counted over all epochs.

        Raises:
          IndexError: if `step` is negative.
        """
        return self._keys[next(self._parts_of(check_step(step)))[0]]

    def component_parts(
        self, step: int
    ) -> Iterator[tuple[int, BatchIndices, BatchDraws]]:
        """Yields the parts of a step, with the index of the component of each.

        The rows are those of the component, which numbers its examples from 0.

        Args:
          step: the step, counted over all epochs.
        """
        for index, number in self._parts_of(check_step(step)):
            for indices, draws in self.schedules[index].drawn_batches(number):
                first = self._first_rows[index]
                yield index, indices, draws._replace(first_example=first)

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
        taken = self._turns.before(num_steps * self._turns_per_step)
        return MixtureReport(
            num_steps, tuple(map(self._report, range(len(taken)), taken))
        )

    def _report(self, index: int, steps: int) -> ComponentReport:
        """Returns the numbers of a component over its first `steps` steps."""
        name, remedy = f"schedules[{self._keys[index]!r}]", "Its epochs differ."
        schedule = check_type(name, self.schedules[index], BatchSchedule, remedy)
        epoch, epochs = schedule.report(), steps / len(schedule)
        return ComponentReport(
            str(self._keys[index]),
            steps,
            epochs,
            epochs * (epoch.packed_examples or epoch.examples),
            epochs * epoch.real_tokens,
            epoch.padding,
        )

    def _parts_of(self, step: int) -> Iterator[tuple[int, int]]:
        first = step * self._turns_per_step
        return map(self._turns.at, range(first, first + self._turns_per_step))

    def config(self) -> dict[str, Any]:
        return {
            "mixture": self._component_configs(),
            "names": list(self.names),
            "weights": {str(step): x for step, x in self.weights.items()},
            "accumulate": self.accumulate,
        }
