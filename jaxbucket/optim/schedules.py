"""Schedules that depend on the batch, for `optax.inject_hyperparams`.

    tx = optax.inject_hyperparams(optax.adamw)(
        learning_rate=scale_schedule(schedule_by_work(schedule), base_tokens=65_536)
    )

They are stateful schedules of optax: the state of the optimizer holds their counts and
the current learning rate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxbucket.base.checks import check_choice, check_float
from jaxbucket.base.notes import Noting
from jaxbucket.optim.batch_size import Rule, batch_factor, size_in, wide_float

Work: TypeAlias = Literal["examples", "tokens"]
# A count is stored as two integers, because int32 overflows at two billion tokens.
_LOW_BITS = 30


class ScaledScheduleState(NamedTuple):
    """State of `scale_schedule`.

    Attributes:
      factor: `[]` float32, the factor of the last batch.
      inner: the state of the inner schedule: `[]` int32, the next step, or the state of
        a stateful schedule.
    """

    factor: jax.Array
    inner: Any


@dataclasses.dataclass(frozen=True)
class ScaledSchedule:
    """A stateful schedule of optax, made by `scale_schedule`."""

    schedule: Any
    factor: Callable[[Mapping[str, Any]], jax.Array]

    def init(self) -> ScaledScheduleState:
        stateful = isinstance(self.schedule, WorkSchedule)
        inner = self.schedule.init() if stateful else jnp.zeros((), jnp.int32)
        return ScaledScheduleState(jnp.ones((), jnp.float32), inner)

    def __call__(self, state: ScaledScheduleState, **extra: Any) -> jax.Array:
        _check_is_state(state, ScaledScheduleState)
        if isinstance(self.schedule, WorkSchedule):
            value = self.schedule(state.inner, **extra)
        elif callable(self.schedule):
            value = _like_a_number(self.schedule(_step(state.inner, extra)))
        else:
            value = _like_a_number(self.schedule)
        # There is no batch yet when optax initializes the state.
        return value * _like_a_number(self.factor(extra)) if extra else value

    def update(self, state: ScaledScheduleState, **extra: Any) -> ScaledScheduleState:
        if isinstance(self.schedule, WorkSchedule):
            inner = self.schedule.update(state.inner, **extra)
        else:
            inner = optax.safe_increment(_step(state.inner, extra))
        return ScaledScheduleState(self.factor(extra).astype(jnp.float32), inner)


def scale_schedule(
    schedule: optax.ScalarOrSchedule | WorkSchedule,
    *,
    base_examples: float | None = None,
    base_tokens: float | None = None,
    base_rows: float | None = None,
    base_weight: float | None = None,
    rule: Rule = "sqrt",
) -> ScaledSchedule:
    """Returns a schedule multiplied by `rule(batch size / base)` for each batch.

    It scales the learning rate inside the optimizer, so it is correct for every
    optimizer with a learning rate. The schedule is evaluated at the extra argument
    `step` of `update`, which `make_train_step` passes; without it, the schedule counts
    updates.

    Some arguments of Adafactor are not numbers. Wrap it by
    `optax.inject_hyperparams(optax.adafactor, static_args=("dtype_momentum",
    "min_dim_size_to_factor"))`. For parameters in half precision pass
    `hyperparam_dtype=jnp.float32` to `optax.inject_hyperparams`, or optax rounds b2
    to 1.

    Example:
      >>> rate = scale_schedule(1e-3, base_examples=2, rule="linear")
      >>> tx = optax.inject_hyperparams(optax.sgd)(learning_rate=rate)
      >>> params = jnp.ones(1)
      >>> updates, state = tx.update(params, tx.init(params), params, num_examples=10)
      >>> print(updates, round(float(state.hyperparams["learning_rate"]), 6))
      [-0.005] 0.005

    Args:
      schedule: a number, a schedule of optax, or the result of `schedule_by_work`.
      base_examples: as for `scale_by_batch_size`. Pass exactly one base.
      base_tokens: likewise.
      base_rows: likewise.
      base_weight: likewise.
      rule: as for `scale_by_batch_size`.

    Returns:
      A stateful schedule for `optax.inject_hyperparams`.

    Raises:
      ValueError: if not exactly one base is given, it is not positive, the rule is
        unknown, or `schedule` is not one of the above. From `update`: if the size is
        missing.
    """
    if isinstance(schedule, ScaledSchedule):
        raise ValueError(
            "`schedule` is already scaled. Pass its inner schedule, with a `rule` that "
            "multiplies both factors."
        )
    if not callable(schedule):
        check_float("schedule", schedule)
    factor = batch_factor(
        rule,
        base_examples=base_examples,
        base_tokens=base_tokens,
        base_rows=base_rows,
        base_weight=base_weight,
    )
    return ScaledSchedule(schedule, factor)


class WorkScheduleState(NamedTuple):
    """State of `schedule_by_work`: the work so far is `high * 2**30 + low`.

    Attributes:
      high: `[]` uint32, in units of 2**30.
      low: `[]` uint32, below 2**30.
    """

    high: jax.Array
    low: jax.Array


@dataclasses.dataclass(frozen=True)
class WorkSchedule:
    """A stateful schedule of optax, made by `schedule_by_work`."""

    schedule: Callable[[Any], Any]
    work: Work

    def init(self) -> WorkScheduleState:
        return WorkScheduleState(jnp.zeros((), jnp.uint32), jnp.zeros((), jnp.uint32))

    def __call__(self, state: WorkScheduleState, **extra: Any) -> jax.Array:
        del extra
        _check_is_state(state, WorkScheduleState)
        wide = wide_float()
        done = state.high.astype(wide) * 2**_LOW_BITS + state.low.astype(wide)
        note = f"Pass more than 2**31 - 1 {self.work} as a float, such as 1e10."
        # Allows schedules of optax that mix dtypes, since they expect integers.
        with Noting(note), jax.numpy_dtype_promotion("standard"):
            return _like_a_number(self.schedule(done))

    def update(self, state: WorkScheduleState, **extra: Any) -> WorkScheduleState:
        high, low = _high_and_low(size_in(extra, f"num_{self.work}"))
        low = state.low + low
        return WorkScheduleState(
            state.high + high + (low >> _LOW_BITS), low & (2**_LOW_BITS - 1)
        )


def schedule_by_work(
    schedule: Callable[[Any], Any], work: Work = "tokens"
) -> WorkSchedule:
    """Returns a schedule that counts examples or tokens instead of steps.

    The same data yields the same curve for any batch sizes. The durations of the
    schedule, such as its warm-up, are in examples or real tokens.

    Example:
      >>> warmup = optax.linear_schedule(0.0, 1e-3, transition_steps=1_000_000)
      >>> tx = optax.inject_hyperparams(optax.sgd)(schedule_by_work(warmup))
      >>> params = jnp.ones(1)
      >>> state = tx.init(params)
      >>> for _ in range(3):
      ...     updates, state = tx.update(params, state, params, num_tokens=250_000)
      >>> print(state.hyperparams["learning_rate"])
      0.0005

    Args:
      schedule: any schedule of optax. Durations of more than 2**31 - 1 must be floats.
      work: whether to count the "tokens" or "examples" of the whole global batch.

    Returns:
      A stateful schedule for `optax.inject_hyperparams` or `scale_schedule`.

    Raises:
      ValueError: if `schedule` is not a schedule of optax, or `work` is invalid.
      OverflowError: when called, if a duration is an integer that is too large for jax.
    """
    check_choice("work", work, ("examples", "tokens"))
    if isinstance(schedule, ScaledSchedule | WorkSchedule) or not callable(schedule):
        raise ValueError(
            f"`schedule={schedule!r}`: pass a schedule of optax, and the result to "
            "`scale_schedule`."
        )
    return WorkSchedule(schedule, work)


def learning_rate_at(
    schedule: Any,
    step: int,
    *,
    examples_before: int = 0,
    tokens_before: int = 0,
    **sizes: float,
) -> float:
    """Returns the learning rate of a step, without an optimizer.

    Example:
      >>> rate = scale_schedule(1e-3, base_examples=2, rule="linear")
      >>> round(learning_rate_at(rate, step=7, num_examples=10), 6)
      0.005

    Args:
      schedule: a number, a schedule of optax, or the result of `scale_schedule` or
        `schedule_by_work`.
      step: the step, counted from 0.
      examples_before: the number of examples of all earlier steps.
      tokens_before: the number of their real tokens.
      **sizes: `num_examples`, `num_tokens`, `num_rows` or `weight` of the batch.
    """
    factor: Any = 1
    if isinstance(schedule, ScaledSchedule):
        schedule, factor = schedule.schedule, schedule.factor(sizes)
    if isinstance(schedule, WorkSchedule):
        before = tokens_before if schedule.work == "tokens" else examples_before
        rate: Any = schedule(WorkScheduleState(*_high_and_low(np.asarray(before))))
    else:
        rate = schedule(step) if callable(schedule) else schedule
    return float(factor * rate)


def warmup_inverse_sqrt_schedule(
    peak_value: float, warmup_steps: float
) -> Callable[[Any], jax.Array]:
    """Returns a schedule with linear warm-up and inverse square root decay.

    Its value after n steps with w warm-up steps is peak * min(n / w, sqrt(w / n)), as
    in Vaswani et al., 2017, arXiv:1706.03762, section 5.3.

    Example:
      >>> schedule = warmup_inverse_sqrt_schedule(1e-3, 100)
      >>> print(*(f"{schedule(n):.6f}" for n in (50, 100, 400)))
      0.000500 0.001000 0.000500

    Args:
      peak_value: the largest value.
      warmup_steps: the number of steps until the peak; of examples or tokens in
        `schedule_by_work`.

    Returns:
      A function from a count to the value.
    """
    peak_value = check_float("peak_value", peak_value)
    warmup_steps = check_float("warmup_steps", warmup_steps)

    def schedule(count: Any) -> jax.Array:
        ratio = jnp.asarray(count).astype(wide_float()) / warmup_steps
        return peak_value * jnp.minimum(ratio, jax.lax.rsqrt(jnp.maximum(ratio, 1)))

    return schedule


def _step(counted: jax.Array, extra: dict[str, Any]) -> jax.Array:
    step = extra.get("step")
    return counted if step is None else jnp.asarray(step, jnp.int32)


def _check_is_state(state: Any, kind: type) -> None:
    if not isinstance(state, kind):
        raise ValueError(
            "This schedule depends on the batch. Write "
            "`optax.inject_hyperparams(optax.adamw)(learning_rate=schedule)`."
        )


def _like_a_number(value: Any) -> jax.Array:
    """Returns a weakly typed float, which keeps the dtype of momentum unchanged."""
    return jax.lax.full_like(1.0, value)


def _high_and_low(size: jax.Array | np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Splits a number of examples or tokens into units of 2**30 and the rest."""
    if isinstance(size, jax.Array):
        return jnp.zeros((), jnp.uint32), size.astype(jnp.uint32)
    high, low = divmod(int(size), 2**_LOW_BITS)
    return jnp.asarray(high, jnp.uint32), jnp.asarray(low, jnp.uint32)
