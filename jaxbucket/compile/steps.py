"""One executable per bucket, made before the step that needs it."""

from __future__ import annotations

import collections
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxbucket.base.batch import Batch
from jaxbucket.base.buckets import Bucket
from jaxbucket.base.padding import PadValue
from jaxbucket.compile.check_step import check_step
from jaxbucket.compile.events import Trace, on_purpose, record_arguments, shapes_of
from jaxbucket.compile.executable_cache import ExecutableCache
from jaxbucket.compile.guard import CompileGuard, OnCompile
from jaxbucket.compile.mismatch import (
    batch_difference,
    check_is_batch,
    state_difference,
)
from jaxbucket.compile.options import CompileOptions, Unplanned
from jaxbucket.compile.pad import BucketPadder
from jaxbucket.compile.program import Label, Program
from jaxbucket.compile.report import CompileReport
from jaxbucket.compile.xla_cache import use_xla_cache

# Enough to keep a device busy, however short a step is.
_MAX_IN_FLIGHT = 8


def compile_steps(
    step_fn: Callable[[Any, Batch], Any],
    state: Any,
    specs: Mapping[Bucket, Batch],
    *,
    workers: int | None = None,
    opening: Bucket | Sequence[Bucket] = (),
    executables: ExecutableCache | str | os.PathLike[str] | None = None,
    xla_cache: str | os.PathLike[str] | None = None,
    unplanned: Unplanned = "raise",
    pad_value: PadValue = 0,
    on_compile: OnCompile = "warn",
    progress: bool = True,
) -> CompiledSteps:
    """Compiles a step for every bucket ahead of time.

    Programs are traced one after another and compiled several at a time, the longest
    first, so that a bucket that does not fit is known at once. In several processes all
    must call this, in the same order.

    Example:
      >>> import numpy as np
      >>> import jaxbucket as jb
      >>> plan = jb.BucketPlan.from_shapes([(8, 4), (2, 16)])
      >>> mesh, example = jb.data_mesh(jax.devices()[:1]), {"x": np.ones(3, "f4")}
      >>> def count_tokens(state, batch):
      ...     return state + batch.num_tokens
      >>> state = jb.sharding.replicate(np.int32(0), mesh)
      >>> specs = jb.sharding.batch_specs(plan, example, mesh)
      >>> steps = compile_steps(count_tokens, state, specs)
      >>> local = jb.data.collate_rows([example] * 2, plan.buckets[0])
      >>> (batch,) = jb.sharding.prefetch_to_mesh([local], mesh)
      >>> steps(state, batch)
      Array(6, dtype=int32)

    Args:
      step_fn: `(state, batch) -> anything`, jitted or not, such as what
        `make_train_step` returns. What it donates is its own choice:
        `jax.jit(step_fn, donate_argnums=0)`. A step that returns a new state must
        return it in the sharding it came in, as `make_train_step`'s does.
      state: the first state, a pytree of arrays, or the shapes, dtypes and shardings of
        one.
      specs: bucket -> a `Batch` of shapes, dtypes and shardings, from `batch_specs`.
      workers: how many programs are compiled at a time, beside the next one's tracing;
        by default one for two cores, because XLA's compiler uses more than one itself.
      opening: a bucket that is compiled first and alone, for training to begin on it
        (`BatchSchedule(..., opening=[(bucket, steps)])`): the others are compiled in
        threads meanwhile, and a step waits only where its bucket is not ready. Of
        several buckets the first is that one, and the others follow in this order.
      executables: a folder, or an `ExecutableCache`, where executables are kept and
        found again, without compiling.
      xla_cache: a folder for jax's own compilation cache, which holds for all that is
        compiled in this process from here on, and spares XLA's work, not tracing. On a
        CPU, what is kept in `executables` is not kept there, too.
      unplanned: what becomes of a batch that is not as planned: "raise" refuses it;
        "longer" pads one of another shape, with empty rows and `pad_value`, to the
        cheapest bucket that it fits in; "jit" compiles for it. Each is warned about
        once.
      pad_value: what "longer" fills sequences with, as the batches were: name ->
        number, 0 for those without one. A number alone is of the only one there is.
      on_compile: what happens where XLA compiles a function of this name after all is
        ready: "warn", "raise" or "ignore".
      progress: show a progress bar on a terminal.

    Returns:
      `steps(state, batch)`, which runs the executable of the batch's bucket.

    Raises:
      ValueError: if `step_fn` cannot be called; if `state` has something else than
        arrays, or a shape without a sharding; if `specs` is empty or not from
        `batch_specs`, or `opening` names a bucket that is not in it; for an unknown
        choice; if `workers` is not positive; if `pad_value` is one number other than 0
        for several sequences, names none of them, or is beyond a dtype; if jax's
        compilation cache is another folder.
      RuntimeError: if another process compiles something else, or has failed.
      Exception: what tracing or XLA raised for a bucket, with a note of which.
    """
    options = CompileOptions(
        workers,
        (opening,) if isinstance(opening, Bucket) else tuple(opening),
        executables
        if executables is None or isinstance(executables, ExecutableCache)
        else ExecutableCache(executables),
        unplanned,
        on_compile,
        progress,
        pad_value=pad_value,
    )
    if xla_cache is not None:
        use_xla_cache(xla_cache)
    return compile_by(options, step_fn, state, specs)


def compile_by(
    options: CompileOptions,
    step_fn: Callable[[Any, Batch], Any],
    state: Any,
    specs: Mapping[Bucket, Batch],
) -> CompiledSteps:
    """Does what `compile_steps` does, with options that are checked."""
    check_step(step_fn, state, specs)
    if hasattr(step_fn, "compile_steps"):
        # A step of several phases knows them.
        return step_fn.compile_steps(state, specs, options)  # pyright: ignore
    if not hasattr(step_fn, "lower"):
        step_fn = jax.jit(record_arguments(step_fn))
    return CompiledSteps(step_fn, (state,), specs, options)


class CompiledSteps(Mapping[Bucket, Any]):
    """`steps(state, batch)`; also a mapping from bucket to its executable.

    `compile_steps` makes it.

    Example:
      >>> import numpy as np
      >>> import jaxbucket as jb
      >>> plan, mesh = jb.BucketPlan.from_shapes([(8, 4)]), jb.data_mesh()
      >>> specs = jb.sharding.batch_specs(plan, {"x": np.ones(3, "f4")}, mesh)
      >>> def sum_step(state, batch):
      ...     return state, batch.features["x"].sum()
      >>> state = jb.sharding.replicate(np.int32(0), mesh)
      >>> steps = jb.compile_steps(sum_step, state, specs)
      >>> list(steps) == list(plan.buckets)
      True
      >>> isinstance(steps[plan.buckets[0]], jax.stages.Compiled)
      True
      >>> steps.report
      <1 programs, 1 of them compiled>

    Args:
      step_fn: jitted.
      whole: shapes of the arguments before the batch, the state first.
      specs: bucket -> a `Batch` of shapes, dtypes and shardings.
      options: how it is compiled.
      phases: programs beside those of the buckets, that every step needs.

    Raises:
      ValueError: if the options do not fit these specs.
      Exception: what tracing or XLA raised for a bucket.
    """

    def __init__(
        self,
        step_fn: Any,
        whole: tuple[Any, ...],
        specs: Mapping[Bucket, Batch],
        options: CompileOptions,
        phases: Sequence[Program] = (),
    ):
        order = options.order(specs)
        programs = [Program(b, step_fn, (*whole, specs[b])) for b in order]
        self._step_fn = step_fn
        self._specs = dict(specs)
        self._state = shapes_of(whole[0])
        self._unplanned = options.unplanned
        self._pad = BucketPadder(self._specs, options.pad_value)
        self._compiled_for: set[str] = set()
        self._in_flight: collections.deque[jax.Array] = collections.deque()
        self._job = options.build([*phases, *programs[:1]], programs[1:])
        # Not a method, because a guard is not to outlive its steps in a cycle.
        explain = functools.partial(_explain, self._specs, self._state)
        self._guard = CompileGuard(
            step_fn, programs[0].name, options.on_compile, explain
        )

    def __getitem__(self, bucket: Bucket) -> Any:
        if bucket not in self._specs:
            raise KeyError(bucket)
        return self._job[bucket]

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    @property
    def report(self) -> CompileReport:
        """Seconds, bytes and operations of each program that is ready."""
        return self._job.report

    @property
    def seconds(self) -> dict[Bucket, float]:
        """Bucket -> seconds it took to be ready, other buckets beside it perhaps."""
        by_label = {p.label: p.seconds for p in self.report.programs}
        return {b: by_label[str(b)] for b in self._specs if str(b) in by_label}

    @property
    def seconds_waited(self) -> float:
        """Until steps could begin, and for buckets that were not ready later on."""
        return self._job.seconds_waited

    @property
    def failures(self) -> dict[Label, BaseException]:
        """What went wrong with buckets and phases so far."""
        return self._job.failures()

    def wait(self) -> None:
        """Waits for all that is compiled in the background.

        Raises:
          Exception: what tracing or XLA raised for a bucket.
        """
        for label in self._job:
            self._job[label]

    def __call__(self, state: Any, batch: Batch) -> Any:
        """Runs the executable of the batch's bucket.

        Args:
          state: of the shapes, dtypes and shardings that were compiled for.
          batch: a global batch, from `prefetch_to_mesh`.

        Returns:
          What the step function returns.

        Raises:
          ValueError: if the batch has a shape, dtype or feature outside the plan, or
            the state is another than was compiled for.
        """
        return self.run(state, self.fit(batch))

    def fit(self, batch: Batch) -> Batch:
        """Returns a batch as it was planned, padded if `unplanned` is "longer".

        Raises:
          ValueError: if it is not as planned, and `unplanned` is not "jit".
        """
        check_is_batch("batch", batch)
        difference = batch_difference(batch, self._specs)
        if difference is None or self._unplanned == "jit":
            return batch
        if self._unplanned == "raise":
            raise ValueError(difference)
        return self._pad(batch, difference)

    def run(self, state: Any, *args: Any) -> Any:
        """Runs the executable of the bucket of the last argument, a batch that fits."""
        batch, may_compile = args[-1], self._unplanned == "jit"
        difference = batch_difference(batch, self._specs) if may_compile else None
        if difference is None:
            try:
                return self.run_program(batch.bucket, state, *args)
            except ValueError as error:
                if not may_compile:
                    raise
                difference = str(error)
        if difference not in self._compiled_for:
            self._compiled_for.add(difference)
            self._guard.report(difference)
        with on_purpose():
            return self.throttle(self._step_fn(state, *args))

    def run_program(self, label: Label, *args: Any) -> Any:
        """Runs one of its programs, if its arguments are what it was compiled for.

        Raises:
          ValueError: if they are not.
        """
        executable = self._job[label]
        try:
            return self.throttle(executable(*args))
        except (TypeError, ValueError) as error:
            # Compared after a refusal, because before every step it would cost time.
            difference = args and state_difference(args[0], self._state, label)
            raise ValueError(difference or str(error)) from error

    def throttle(self, result: Any) -> Any:
        """Returns a result, and waits for one of a few steps before.

        So a loop that never looks at its metrics does not run far ahead. Every step
        that waits holds its batch; and two processes of two CPU devices each have hung
        where nothing held them back (jax 0.10, one run in nine).
        """
        leaves = jax.tree.leaves(result)
        if leaves:
            # A state, which comes first, is soon donated; metrics are not.
            self._in_flight.append(leaves[-1])
        if len(self._in_flight) > _MAX_IN_FLIGHT:
            earlier = self._in_flight.popleft()
            if not earlier.is_deleted():
                earlier.block_until_ready()
        return result


def _explain(
    specs: Mapping[Bucket, Batch], state_shapes: Any, trace: Trace | None
) -> str:
    """Why the step was compiled although it was compiled ahead."""
    if trace is None:
        return (
            "it, or another function of this name, was called directly. Call what "
            "`compile_steps` returned, or rename the other one."
        )
    state, *_, batch = trace.args
    what = (
        batch_difference(batch, specs)
        or state_difference(state, state_shapes, batch.bucket)
        or f"for {batch.bucket}, of which there is an executable, in another "
        "sharding perhaps."
    )
    return f"{what} It was called directly: call what `compile_steps` returned."
