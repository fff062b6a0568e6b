"""Compiles one executable per bucket, before the step that needs it."""

from __future__ import annotations

import collections
import functools
import os
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import jax

from jaxbucket.base.batch import Batch, check_is_batch
from jaxbucket.base.bucket import Bucket
from jaxbucket.base.table import bytes_text
from jaxbucket.compile.build import Build, CompileOptions, Label, Program
from jaxbucket.compile.report import CompileReport

_Result = TypeVar("_Result")
# Enough to keep a device busy even if steps are short.
_MAX_IN_FLIGHT = 8
# Parts of a training state that evaluation does not need.
_OF_TRAINING = ("frozen", "opt_state")
_FOR_EVALUATION = (
    "For evaluation or prediction, compile for `jb.create_state(state, mesh=mesh)`, "
    "which has neither an optimizer nor frozen parameters, and pass such states."
)


def compile_steps(
    step_fn: Callable[[Any, Batch], _Result],
    state: Any,
    specs: Mapping[Bucket, Batch],
    *,
    workers: int | None = None,
    executables: str | os.PathLike[str] | None = None,
    executables_key: str = "",
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
        return it with the sharding of the old state, as `make_train_step`'s does; so
        must one that changes NNX modules in place: `return (model, optimizer), loss`.
      state: the initial state, a pytree of arrays; or its shapes, dtypes and shardings.
      specs: bucket -> a `Batch` of shapes, dtypes and shardings, from `batch_specs`.
      workers: the number of programs to compile at the same time, while the next one is
        traced. Defaults to half the number of CPU cores, because XLA's compiler itself
        uses more than one.
      executables: a folder to save executables in, and to load them from instead of
        compiling. Loading a file can execute arbitrary code, so choose a folder to
        which only people you trust can write.
      executables_key: anything else that executables depend on. The folder already
        distinguishes programs, versions, devices, processes and XLA flags.
      progress: whether to show a progress bar on a terminal.

    Returns:
      `steps(state, batch)`, which runs the executable of the batch's bucket.

    Raises:
      ValueError: if `state` contains shapes without a sharding; if `step_fn` changes it
        without returning it; if `specs` is empty or not from `batch_specs`; if
        `workers` is not positive; or if `executables` is not on a file system.
      Exception: any error of tracing or compiling, with a note that names the bucket.
    """
    options = CompileOptions(workers, executables, executables_key, progress)
    return compile_with(options, step_fn, state, specs)


def compile_with(
    options: CompileOptions,
    step_fn: Callable[[Any, Batch], _Result],
    state: Any,
    specs: Mapping[Bucket, Batch],
) -> CompiledSteps[_Result]:
    """Compiles as `compile_steps` does, with options that are already checked."""
    _check_arguments(state, specs)
    if hasattr(step_fn, "compile_steps"):
        # A step that consists of several phases compiles them itself.
        return step_fn.compile_steps(state, specs, options)  # pyright: ignore
    # What `nnx.jit` returns has stages of its own.
    is_nnx = type(step_fn).__module__.startswith("flax.")
    if not hasattr(step_fn, "lower") or is_nnx:
        step_fn = jax.jit(_returning_changes(step_fn))
    return CompiledSteps(step_fn, (state,), specs, options)


def _returning_changes(
    step_fn: Callable[[Any, Batch], _Result],
) -> Callable[[Any, Batch], _Result]:
    """Returns a step that raises a ValueError if it loses changes of its state."""

    @functools.wraps(step_fn)
    def step(state: Any, batch: Batch) -> _Result:
        before = jax.tree.leaves(state)
        result = step_fn(state, batch)
        # An NNX module is changed in place, in a copy that exists while tracing.
        after = jax.tree.leaves(state)
        known = {*map(id, before), *map(id, jax.tree.leaves(result))}
        if not known.issuperset(map(id, after)):
            raise ValueError(
                "`step_fn` changes its state in place, and does not return it, so the "
                "changes are lost. Return the state: `return state, metrics`."
            )
        return result

    return step


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

    Attributes:
      report: the seconds and bytes of each program.
      failures: label, as in the report -> the error of a bucket or phase, if the
        options say to keep going.
      seconds_waited: the time that it took to compile all programs.

    Raises:
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
        # The longest first. The name makes the order of ties the same in all processes.
        order = sorted(
            specs, key=lambda b: (b.tokens_per_row, b.batch_size, str(b)), reverse=True
        )
        programs = [Program(b, step_fn, (*leading_args, specs[b])) for b in order]
        build = Build([*phases, *programs], options)
        self.report: CompileReport = build.report
        self.failures: dict[str, Exception] = build.failures
        self.seconds_waited = build.seconds
        self._executables = build.executables
        self._arrays = {bucket: _arrays(spec) for bucket, spec in specs.items()}
        self._in_flight: collections.deque[tuple[Label, jax.Array]]
        self._in_flight = collections.deque()

    def __getitem__(self, bucket: Bucket) -> Any:
        if bucket not in self._arrays:
            raise KeyError(bucket)
        return self._executables[bucket]

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    @property
    def seconds(self) -> dict[Bucket, float]:
        """Bucket -> seconds to build it, possibly while others were built as well."""
        by_label = {p.label: p.seconds for p in self.report.programs}
        return {b: by_label[str(b)] for b in self if str(b) in by_label}

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
        return self.run_program(self.bucket_of(batch), state, batch)

    def bucket_of(self, batch: Batch) -> Bucket:
        """Returns the bucket of a batch, a key of this mapping.

        If components of a mixture have a bucket in common, but different features, it
        is the key of the features that the batch has. Raises a ValueError if the batch
        has another shape, dtype or feature than those that were compiled for.
        """
        check_is_batch("batch", batch)
        bucket, arrays = batch.bucket, _arrays(batch)
        if self._arrays.get(bucket) == arrays:
            return bucket
        for other, expected in self._arrays.items():
            if expected == arrays:
                return other
        if bucket not in self._arrays:
            raise ValueError(
                f"A batch of shape {bucket} is outside the plan, which has "
                f"{', '.join(map(str, self))}. Pass global batches of this plan."
            )
        expected = self._arrays[bucket]
        names = sorted(arrays | expected)
        name = next(x for x in names if arrays.get(x) != expected.get(x))
        raise ValueError(
            f"`batch{name}` is {arrays.get(name, 'missing')}, but {bucket} was "
            f"compiled for {expected.get(name, 'a batch without it')}. Convert the "
            "batch, or call `batch_specs` with an example like it."
        )

    def run_program(self, label: Label, *args: Any) -> Any:
        """Runs the program of a bucket or a phase; returns its outputs.

        Raises a ValueError if the arguments differ from those that were compiled for.
        If memory is exhausted, jax's error has a note that says what to do.
        """
        try:
            result = self._executables[label](*args)
        except jax.errors.JaxRuntimeError as error:
            self._explain(error, label, args)
            raise
        except (TypeError, ValueError) as error:
            # jax names what differs.
            hint = any(name in str(error) for name in _OF_TRAINING)
            raise ValueError(
                f"The state differs from the one that {label} was compiled for. "
                f"{error}\nPass one with the same arrays and constants, or compile "
                f"again. {_FOR_EVALUATION if hint else ''}"
            ) from error
        self._throttle(label, result)
        return result

    def _throttle(self, label: Label, result: Any) -> None:
        """Waits for the result of an earlier step.

        This limits how far a loop that never reads its metrics runs ahead of the
        devices. Every pending step keeps its batch in memory; and without a limit, two
        processes with two CPU devices each sometimes hang (jax 0.10, one run in nine).
        The last leaf of the result must not be donated later.
        """
        leaves = jax.tree.leaves(result)
        if leaves:
            # The state comes first and is donated to the next step; metrics are not.
            self._in_flight.append((label, leaves[-1]))
        if len(self._in_flight) > _MAX_IN_FLIGHT:
            label, earlier = self._in_flight.popleft()
            try:
                if not earlier.is_deleted():
                    earlier.block_until_ready()
            except jax.errors.JaxRuntimeError as error:
                # Later steps have taken its state.
                self._explain(error, label, None)
                raise

    def _explain(self, error: Exception, label: Label, args: Any) -> None:
        """Adds to an error of exhausted memory which program it was, and what to do.

        Args:
          error: the error of an executable.
          label: the bucket or phase.
          args: the arguments of the executable, the first of which is the state; None
            if later steps have donated it.
        """
        if not is_out_of_memory(error):
            return
        peaks = {p.label: p.peak_bytes for p in self.report.programs}
        peak = peaks.get(str(label))
        needs = "" if peak is None else f", which needs {bytes_text(peak)}"
        is_lost = args is None or any(
            isinstance(leaf, jax.Array) and leaf.is_deleted()
            for leaf in jax.tree.leaves(args[:1])
        )
        state = "The state was donated to it: resume from the last checkpoint."
        if not is_lost:
            state = "The state is intact: save a checkpoint before you stop."
        error.add_note(
            f"Memory was exhausted by the program of {label}{needs} on each device, "
            f"besides batches that wait and anything else in memory. {state} Then plan "
            "with a smaller `max_tokens` for this T: `jaxbucket fit` finds the largest."
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether jax raised an error because the memory of a device is exhausted."""
    text = str(error)
    is_of_jax = isinstance(error, jax.errors.JaxRuntimeError)
    # The memory of a core, in which the blocks of a kernel have to be, is another.
    return is_of_jax and "RESOURCE_EXHAUSTED" in text and "vmem" not in text.lower()


def _check_arguments(state: Any, specs: Any) -> None:
    """Raises a ValueError for arguments of `compile_steps` that jax would accept."""
    is_valid = isinstance(specs, Mapping) and all(
        isinstance(batch, Batch)
        and batch.bucket == Bucket(bucket.batch_size, bucket.seq_len)
        for bucket, batch in specs.items()
    )
    if not is_valid or not specs:
        raise ValueError(
            f"`specs` is {short(specs)}. Pass `MeshLoader.specs`, or the result of "
            "`jb.sharding.batch_specs`."
        )
    for path, leaf in jax.tree.leaves_with_path(state):
        if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None:
            raise ValueError(
                f"`state{jax.tree_util.keystr(path)}` is a shape without a sharding. "
                "Pass the result of `jax.eval_shape` through `jb.sharding.replicate`."
            )


def short(value: Any) -> str:
    """Returns a short text for any value, with its type, for a message."""
    return f"{reprlib.repr(value)} ({type(value).__name__})"


def _arrays(tree: Any) -> dict[str, str]:
    """Returns the path of each leaf -> its dtype and shape."""
    leaves, _ = jax.tree.flatten_with_path(tree)
    return {jax.tree_util.keystr(path): _type_of(leaf) for path, leaf in leaves}


def _type_of(leaf: Any) -> str:
    if not hasattr(leaf, "dtype"):
        return f"a {type(leaf).__name__}"
    return f"{leaf.dtype}{list(leaf.shape)}"
