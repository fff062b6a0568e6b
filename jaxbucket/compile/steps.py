"""Compiles one executable per bucket, before the step that needs it."""

from __future__ import annotations

import collections
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import jax

from jaxbucket.base.batch import Batch
from jaxbucket.base.bucket import Bucket
from jaxbucket.base.padding import PadValue
from jaxbucket.compile.check_step import check_step
from jaxbucket.compile.events import Trace, allow_compiles, record_arguments, shapes_of
from jaxbucket.compile.executable_cache import ExecutableCache
from jaxbucket.compile.guard import CompileGuard, OnCompile
from jaxbucket.compile.mismatch import (
    batch_difference,
    check_is_batch,
    spec_bucket,
    state_difference,
)
from jaxbucket.compile.options import CompileOptions, Unplanned
from jaxbucket.compile.pad import BucketPadder
from jaxbucket.compile.program import Label, Program
from jaxbucket.compile.report import CompileReport
from jaxbucket.compile.xla_cache import use_xla_cache

_Result = TypeVar("_Result")
# Enough to keep a device busy even if steps are short.
_MAX_IN_FLIGHT = 8


def compile_steps(
    step_fn: Callable[[Any, Batch], _Result],
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
) -> CompiledSteps[_Result]:
    """Compiles a step function for every bucket ahead of time.

    Programs are traced one after another and compiled several at a time. The longest
    bucket comes first, so that one that does not fit into memory fails early. With
    several processes, all of them must call this function, in the same order.

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
      step_fn: `(state, batch) -> anything`, jitted or not, such as the result of
        `make_train_step`. To donate the state, jit it yourself:
        `jax.jit(step_fn, donate_argnums=0)`. A step that returns a new state must
        return it with the sharding of the old state, as `make_train_step`'s does.
      state: the initial state, a pytree of arrays; or its shapes, dtypes and shardings.
      specs: bucket -> a `Batch` of shapes, dtypes and shardings, from `batch_specs`.
      workers: the number of programs to compile at the same time, while the next one is
        traced. Defaults to half the number of CPU cores, because XLA's compiler itself
        uses more than one.
      opening: a bucket to compile first, by itself, so that training can start with it
        (`BatchSchedule(..., opening=[(bucket, steps)])`). The other buckets are then
        compiled in background threads, and a step waits only if its bucket is not
        ready. Of a sequence of buckets, the first is compiled by itself, and the others
        follow in the given order.
      executables: a folder, or an `ExecutableCache`, to save executables in, and to
        load them from instead of compiling.
      xla_cache: a folder for jax's own compilation cache. It applies to everything that
        this process compiles from now on, and saves the time of XLA, but not of
        tracing. On CPUs, programs saved in `executables` are not added to it.
      unplanned: how to treat a batch that differs from the plan. "raise" raises a
        ValueError. "longer" pads a batch of a different shape, with empty rows and
        `pad_value`, to the bucket with the fewest tokens that it fits in. "jit"
        compiles a program for it. The last two warn once about each difference.
      pad_value: the value with which "longer" pads sequences: name -> number, with 0
        for other features; or a single number if there is only one sequence. Pass the
        value with which the batches were padded. Of the components of a mixture, it
        applies to those in which the feature is a sequence; batches of a component
        whose dtype cannot hold it are not padded, and raise a ValueError.
      on_compile: the action if XLA compiles a function of this name after all programs
        are ready: "warn", "raise" or "ignore".
      progress: whether to show a progress bar on a terminal.

    Returns:
      `steps(state, batch)`, which runs the executable of the batch's bucket.

    Raises:
      ValueError: if `step_fn` is not callable; if `state` contains values that are not
        arrays, or shapes without a sharding; if `specs` is empty or not from
        `batch_specs`; if `opening` names a bucket that is not in `specs`; if an option
        is unknown; if `workers` is not positive; if `pad_value` is a nonzero number for
        several sequences, names an unknown feature, or does not fit its dtype in any
        component; if jax's compilation cache already uses a different folder.
      RuntimeError: if another process compiles different programs, or has failed.
      Exception: any error of tracing or compiling, with a note that names the bucket.
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
    step_fn: Callable[[Any, Batch], _Result],
    state: Any,
    specs: Mapping[Bucket, Batch],
) -> CompiledSteps[_Result]:
    """Compiles as `compile_steps` does, with options that are already checked."""
    check_step(step_fn, state, specs)
    if hasattr(step_fn, "compile_steps"):
        # A step that consists of several phases compiles them itself.
        return step_fn.compile_steps(state, specs, options)  # pyright: ignore
    if not hasattr(step_fn, "lower"):
        step_fn = jax.jit(record_arguments(step_fn))
    return CompiledSteps(step_fn, (state,), specs, options)


class CompiledSteps(Mapping[Bucket, Any], Generic[_Result]):
    """A compiled step, `steps(state, batch)`, and a mapping: bucket -> executable.

    It is the result of `compile_steps`.

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
      <CompileReport: 1 programs, 1 compiled>

    Args:
      step_fn: a jitted function.
      leading_args: the shapes of the arguments before the batch; the first one is the
        state.
      specs: bucket -> a `Batch` of shapes, dtypes and shardings.
      options: the options of the compilation.
      phases: further programs that every step needs, besides those of the buckets.

    Raises:
      ValueError: if the options do not fit these specs.
      Exception: any error of tracing or compiling a bucket.
    """

    def __init__(
        self,
        step_fn: Any,
        leading_args: tuple[Any, ...],
        specs: Mapping[Bucket, Batch],
        options: CompileOptions,
        phases: Sequence[Program] = (),
    ):
        order = options.order(specs)
        programs = [Program(b, step_fn, (*leading_args, specs[b])) for b in order]
        self._step_fn = step_fn
        self._specs = dict(specs)
        self._state = shapes_of(leading_args[0])
        self._unplanned = options.unplanned
        self._pad = BucketPadder(self._specs, options.pad_value)
        self._compiled_for: set[str] = set()
        self._in_flight: collections.deque[jax.Array] = collections.deque()
        self._job = options.build([*phases, *programs[:1]], programs[1:])
        # Not a method, which would keep these steps alive in a reference cycle with
        # their guard.
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
        """The seconds, bytes and operations of each program that is ready."""
        return self._job.report

    @property
    def seconds(self) -> dict[Bucket, float]:
        """Bucket -> seconds to build it, possibly while others were built as well."""
        by_label = {p.label: p.seconds for p in self.report.programs}
        return {b: by_label[str(b)] for b in self._specs if str(b) in by_label}

    @property
    def seconds_waited(self) -> float:
        """Seconds spent waiting, at launch and later for buckets not yet ready."""
        return self._job.seconds_waited

    @property
    def failures(self) -> dict[Label, BaseException]:
        """The errors of buckets and phases so far."""
        return self._job.failures()

    def wait(self) -> None:
        """Waits until all programs are ready.

        Raises:
          Exception: any error of tracing or compiling a bucket.
        """
        for label in self._job:
            self._job[label]

    def __call__(self, state: Any, batch: Batch) -> _Result:
        """Runs the executable of the batch's bucket.

        Args:
          state: a state with the shapes, dtypes and shardings of the initial one.
          batch: a global batch, from `prefetch_to_mesh`.

        Returns:
          The outputs of the step function.

        Raises:
          ValueError: if the batch has a shape, dtype or feature outside the plan, or
            the state differs from the initial one in shape, dtype or sharding.
        """
        return self.run(state, self.fit(batch))

    def fit(self, batch: Batch) -> Batch:
        """Returns the batch, padded to a bucket if `unplanned` is "longer".

        Args:
          batch: a global batch, from `prefetch_to_mesh`.

        Raises:
          ValueError: if the batch differs from the plan and `unplanned` is "raise"; or
            if `unplanned` is "longer" and the batch fits in no bucket, or `pad_value`
            does not fit its dtypes.
        """
        check_is_batch("batch", batch)
        difference = batch_difference(batch, self._specs)
        if difference is None or self._unplanned == "jit":
            return batch
        if self._unplanned == "raise":
            raise ValueError(difference)
        return self._pad(batch, difference)

    def run(self, state: Any, *args: Any) -> Any:
        """Runs the executable of the batch's bucket.

        If `unplanned` is "jit", it compiles a program for other arguments.

        Args:
          state: a state with the shapes, dtypes and shardings of the initial one.
          *args: the remaining arguments of the step function. The last one is the
            batch, as `fit` returns it.

        Returns:
          The outputs of the step function.

        Raises:
          ValueError: if the arguments differ from those that were compiled for, unless
            `unplanned` is "jit".
        """
        batch, may_compile = args[-1], self._unplanned == "jit"
        difference = batch_difference(batch, self._specs) if may_compile else None
        if difference is None:
            try:
                bucket = spec_bucket(batch, self._specs)
                return self.run_program(bucket, state, *args)
            except ValueError as error:
                if not may_compile:
                    raise
                difference = str(error)
        if difference not in self._compiled_for:
            self._compiled_for.add(difference)
            self._guard.report(difference)
        with allow_compiles():
            return self.throttle(self._step_fn(state, *args))

    def run_program(self, label: Label, *args: Any) -> Any:
        """Runs the program of a bucket or a phase.

        Args:
          label: a bucket, or the name of a phase.
          *args: the arguments of the program; the first one is the state.

        Returns:
          The outputs of the program.

        Raises:
          ValueError: if the arguments differ from those that were compiled for.
        """
        executable = self._job[label]
        try:
            return self.throttle(executable(*args))
        except (TypeError, ValueError) as error:
            # Only compared after a failure, because each comparison takes time.
            difference = args and state_difference(args[0], self._state, label)
            raise ValueError(difference or str(error)) from error

    def throttle(self, result: Any) -> Any:
        """Waits for the result of an earlier step, and returns the given result.

        This limits how far a loop that never reads its metrics runs ahead of the
        devices. Every pending step keeps its batch in memory; and without a limit, two
        processes with two CPU devices each sometimes hang (jax 0.10, one run in nine).

        Args:
          result: the outputs of a step. Its last leaf must not be donated later.

        Returns:
          The same result.
        """
        leaves = jax.tree.leaves(result)
        if leaves:
            # The state comes first and is donated to the next step; metrics are not.
            self._in_flight.append(leaves[-1])
        if len(self._in_flight) > _MAX_IN_FLIGHT:
            earlier = self._in_flight.popleft()
            if not earlier.is_deleted():
                earlier.block_until_ready()
        return result


def _explain(
    specs: Mapping[Bucket, Batch], state_shapes: Any, trace: Trace | None
) -> str:
    """Returns why a step was compiled again, as part of a message."""
    if trace is None:
        return (
            "it, or a different function of the same name, was called directly. Call "
            "the result of `compile_steps`, or rename the other function."
        )
    state, *_, batch = trace.args
    difference = (
        batch_difference(batch, specs)
        or state_difference(state, state_shapes, batch.bucket)
        or f"{batch.bucket} has an executable, perhaps for different shardings."
    )
    return (
        f"{difference} The step function was called directly. Call the result of "
        "`compile_steps` instead."
    )
