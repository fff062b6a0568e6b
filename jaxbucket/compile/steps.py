"""One executable per bucket, made before the step that needs it."""

from __future__ import annotations

import collections
import dataclasses
import os
import reprlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxbucket.base.batch import Batch
from jaxbucket.base.buckets import Bucket
from jaxbucket.base.checks import check_choice
from jaxbucket.base.padding import PadValue, pad_arrays
from jaxbucket.compile.build import Building
from jaxbucket.compile.events import Trace, noting_arguments
from jaxbucket.compile.executable_cache import ExecutableCache
from jaxbucket.compile.guard import CompileGuard, OnCompile
from jaxbucket.compile.mismatch import (
    batch_difference,
    check_is_batch,
    state_difference,
)
from jaxbucket.compile.program import CompileReport, Label, Program
from jaxbucket.compile.xla_cache import use_xla_cache

Unplanned: TypeAlias = Literal["raise", "longer", "jit"]
# Enough to keep a device busy, however short a step is.
_MOST_IN_FLIGHT = 8


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
    first: what does not fit says so at once. In several processes all must call this,
    in the same order.

    Args:
      step_fn: `(state, batch) -> anything`, jitted or not, or what
        `data_parallel_accumulate` returns. What it donates is its own
        choice: `jax.jit(step_fn, donate_argnums=0)`. A step that returns a new state
        must return it in the sharding it came in, as `data_parallel`'s does.
      state: the first state, or the shapes, dtypes and shardings of one.
      specs: a batch's shapes for every bucket, from `batch_specs`.
      workers: how many are compiled at a time, beside the next one's tracing; by
        default one for two cores, for XLA's compiler uses more than one itself.
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
      ValueError: if `specs` is empty, or `opening` names a bucket that is not in it;
        for an unknown choice; if `pad_value` is one number other than 0 for several
        sequences, names none of them, or is beyond a dtype; if jax's compilation cache
        is another folder.
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
    """The same with options that are checked."""
    check_step(step_fn, state, specs)
    if hasattr(step_fn, "compile_steps"):
        # A step of several phases knows them.
        return step_fn.compile_steps(state, specs, options)  # pyright: ignore
    if not hasattr(step_fn, "lower"):
        step_fn = jax.jit(noting_arguments(step_fn))
    return CompiledSteps(step_fn, (state,), specs, options)


def check_step(step_fn: Any, state: Any, specs: Any) -> None:
    """Raises a ValueError if these are not what `compile_steps` takes."""
    if not callable(step_fn) and not hasattr(step_fn, "compile_steps"):
        raise ValueError(
            f"`step_fn` is {shown(step_fn)}, which cannot be called: pass a function "
            "of (state, batch)."
        )
    _check_specs(specs)
    for path, leaf in jax.tree.leaves_with_path(state):
        _check_leaf(f"`state{jax.tree_util.keystr(path)}`", leaf)


def _check_specs(specs: Any) -> None:
    if not isinstance(specs, Mapping):
        raise ValueError(f"`specs` is {shown(specs)}: pass what `batch_specs` returns.")
    if not specs:
        raise ValueError("`specs` is empty: pass what `batch_specs` returns.")
    for bucket, batch in specs.items():
        if not isinstance(bucket, Bucket) or not isinstance(batch, Batch):
            raise ValueError(
                f"`specs` has {shown(batch)} for {shown(bucket)}, not a `Batch` of "
                "shapes for a `Bucket`: pass what `batch_specs` returns."
            )
        if batch.bucket != bucket:
            raise ValueError(
                f"`specs[{bucket}]` is a batch of shape {batch.bucket}: pass what "
                "`batch_specs` returns."
            )


def _check_leaf(name: str, leaf: Any) -> None:
    is_array = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    if not is_array and not isinstance(leaf, bool | int | float | complex):
        raise ValueError(
            f"{name} is {shown(leaf)}, not an array: a state is a pytree of arrays, or "
            "of their shapes, dtypes and shardings."
        )
    if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None:
        raise ValueError(
            f"{name} is a shape without a sharding, and executables depend on that: "
            "give the shapes that `jax.eval_shape` returns to `replicate`, or "
            "shardings of your own."
        )


def shown(value: Any) -> str:
    """A value of any kind in a few words, for a message."""
    return f"{reprlib.repr(value)} ({type(value).__name__})"


@dataclasses.dataclass(frozen=True)
class CompileOptions:
    """How to compile: the arguments of `compile_steps`.

    Attributes:
      keep_going: compile the other buckets where one fails, and raise nothing.
      pad_value: what fills batches that are padded to a longer bucket.
    """

    workers: int | None
    opening: tuple[Bucket, ...]
    executables: ExecutableCache | None
    unplanned: Unplanned
    on_compile: OnCompile
    progress: bool
    keep_going: bool = False
    pad_value: PadValue = 0

    def __post_init__(self):
        check_choice("unplanned", self.unplanned, get_args(Unplanned))
        check_choice("on_compile", self.on_compile, get_args(OnCompile))
        if self.unplanned == "jit" and self.on_compile == "raise":
            raise ValueError(
                "`unplanned='jit'` compiles for what is not as planned, and "
                "`on_compile='raise'` forbids it: choose one of them."
            )

    def order(self, buckets: Mapping[Bucket, Any]) -> list[Bucket]:
        """The buckets of the opening first, then the longest.

        Raises:
          ValueError: if one of the opening is not there.
        """
        for bucket in self.opening:
            if bucket not in buckets:
                raise ValueError(
                    f"`opening` names {bucket}, which is not in `specs`: choose from "
                    f"{', '.join(map(str, buckets))}."
                )
        rest = sorted(buckets, key=lambda bucket: bucket.seq_len, reverse=True)
        return list(dict.fromkeys([*self.opening, *rest]))

    def build(self, first: list[Program], others: list[Program]) -> Building:
        """Builds programs; if there is an opening, the others in the background."""
        start = self.executables and self.executables.begin(first + others)
        building = Building(
            first + others, start, self.workers, keep_going=self.keep_going
        )
        if self.opening:
            building.build_ahead(len(first))
            return building
        building.build(progress=self.progress)
        building.check()
        return building


class CompiledSteps(Mapping[Bucket, Any]):
    """`steps(state, batch)`; also a mapping from bucket to its executable.

    Args:
      step_fn: jitted.
      whole: shapes of the arguments before the batch, the state first.
      specs: as for `compile_steps`.
      options: likewise.
      phases: programs beside those of the buckets, that every step needs.
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
        self._state = jax.tree.map(_shape, whole[0])
        self._unplanned = options.unplanned
        self._fills = pad_arrays(options.pad_value, _dtypes_of_sequences(specs))
        self._in_flight: collections.deque[jax.Array] = collections.deque()
        self._pads: dict[Any, Callable[[Batch], Batch]] = {}
        self._building = options.build([*phases, *programs[:1]], programs[1:])
        self._guard = CompileGuard(
            step_fn, programs[0].name, options.on_compile, self._explanation
        )

    def __getitem__(self, bucket: Bucket) -> Any:
        if bucket not in self._specs:
            raise KeyError(bucket)
        return self._building[bucket]

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    @property
    def report(self) -> CompileReport:
        """Seconds, bytes and operations of each program that is ready."""
        return self._building.report

    @property
    def seconds(self) -> dict[Bucket, float]:
        """Bucket -> seconds it took to be ready, other buckets beside it perhaps."""
        by_label = {p.label: p.seconds for p in self.report.programs}
        return {b: by_label[str(b)] for b in self._specs if str(b) in by_label}

    @property
    def seconds_waited(self) -> float:
        """Until steps could begin, and for buckets that were not ready later on."""
        return self._building.seconds_waited

    @property
    def failures(self) -> dict[Label, BaseException]:
        """What went wrong with buckets and phases so far."""
        return self._building.failures()

    def wait(self) -> None:
        """Waits for all that is compiled in the background.

        Raises:
          Exception: what tracing or XLA raised for a bucket.
        """
        for label in self._building:
            self._building[label]

    def __call__(self, state: Any, batch: Batch) -> Any:
        """Runs the executable of the batch's bucket.

        Raises:
          ValueError: if the batch has a shape, dtype or feature outside the plan, or
            the state is another than was compiled for.
        """
        return self.run(state, self.fit(batch))

    def fit(self, batch: Batch) -> Batch:
        """Returns a batch as it was planned, padded perhaps.

        Raises:
          ValueError: if it is not, and may not be so.
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
        with self._guard.expecting(difference):
            return self.waited_for(self._step_fn(state, *args))

    def run_program(self, label: Label, *args: Any) -> Any:
        """Runs one of its programs, if its arguments are what it was compiled for.

        Raises:
          ValueError: if they are not.
        """
        executable = self._building[label]
        try:
            return self.waited_for(executable(*args))
        except (TypeError, ValueError) as error:
            # Looked for where it is refused, and not before every step.
            difference = args and state_difference(args[0], self._state, label)
            raise ValueError(difference or str(error)) from error

    def waited_for(self, result: Any) -> Any:
        """Returns a result, and waits for one of a few steps before.

        So a loop that never looks at its metrics does not run far ahead. Every step
        that waits holds its batch; and two processes of two CPU devices each have hung
        where nothing held them back (jax 0.10, one run in nine).
        """
        leaves = jax.tree.leaves(result)
        if leaves:
            # A state, which comes first, is soon donated; metrics are not.
            self._in_flight.append(leaves[-1])
        if len(self._in_flight) > _MOST_IN_FLIGHT:
            earlier = self._in_flight.popleft()
            if not earlier.is_deleted():
                earlier.block_until_ready()
        return result

    def _explanation(self, trace: Trace | None) -> str:
        """Why the step was compiled although it was compiled ahead."""
        if trace is None:
            return (
                "it, or another function of this name, was called directly. Call what "
                "`compile_steps` returned, or rename the other one."
            )
        state, *_, batch = trace.args
        what = (
            batch_difference(batch, self._specs)
            or state_difference(state, self._state, batch.bucket)
            or f"for {batch.bucket}, of which there is an executable, in another "
            "sharding perhaps."
        )
        return f"{what} It was called directly: call what `compile_steps` returned."

    def _pad(self, batch: Batch, difference: str) -> Batch:
        bucket = batch.bucket
        wide_enough = [
            b
            for b in self._specs
            if b.batch_size >= bucket.batch_size and b.seq_len >= bucket.seq_len
        ]
        if bucket in self._specs or not wide_enough:
            raise ValueError(difference)
        target = min(wide_enough, key=lambda b: (b.num_tokens, b.seq_len))
        leaves, structure = jax.tree.flatten(batch)
        key = target, structure, *((leaf.shape, leaf.dtype) for leaf in leaves)
        if key not in self._pads:
            self._pads[key] = _padder(batch, self._specs[target], self._fills)
            warnings.warn(
                f"{difference} It was padded to {target}, as all of this shape are.",
                RuntimeWarning,
                stacklevel=4,
            )
        return self._pads[key](batch)


def _dtypes_of_sequences(specs: Mapping[Bucket, Batch]) -> dict[str, Any]:
    """Name -> dtype of the features that are as long as a sequence in every bucket."""

    def are_sequences(batch: Batch) -> set[str]:
        seq_lens = {ids.shape[1] for ids in batch.segment_ids.values()}
        features = batch.features.items()
        return {name for name, x in features if {*x.shape[1:2]} & seq_lens}

    first = next(iter(specs.values())).features
    names = set.intersection(*map(are_sequences, specs.values()))
    return {name: first[name].dtype for name in first if name in names}


def _padder(
    batch: Batch, spec: Batch, fills: Mapping[str, np.ndarray]
) -> Callable[[Batch], Batch]:
    """Returns a function that pads batches to a shape.

    Features are filled with `fills`, and with zeros where it has none.

    Raises:
      ValueError: if they differ in more than that.
    """

    def widths(leaf: Any, want: Any) -> list[tuple[int, int]]:
        return [(0, b - a) for a, b in zip(leaf.shape, want.shape, strict=True)]

    def fits(leaf: Any, want: Any) -> bool:
        if leaf.dtype != want.dtype or len(leaf.shape) != len(want.shape):
            return False
        grown = [axis for axis, (_, more) in enumerate(widths(leaf, want)) if more]
        of_bucket = [(now.batch_size, then.batch_size), (now.seq_len, then.seq_len)]
        return all(
            axis < 2 and (leaf.shape[axis], want.shape[axis]) == of_bucket[axis]
            for axis in grown
        )

    now, then = batch.bucket, spec.bucket
    alike = jax.tree.structure(batch) == jax.tree.structure(spec)
    if not alike or not all(jax.tree.leaves(jax.tree.map(fits, batch, spec))):
        # What else is other than planned, the shape apart.
        cut = jax.tree.map(lambda x: _cut(x, now, then), spec)
        raise ValueError(batch_difference(batch, {now: cut}))

    zeros = jax.tree.map(lambda _: 0, spec)
    values = zeros._replace(features=zeros.features | dict(fills))

    def pad_batch(batch: Batch) -> Batch:
        return jax.tree.map(
            lambda leaf, want, value: jnp.pad(
                leaf, widths(leaf, want), constant_values=value
            ),
            *(batch, spec, values),
        )

    return jax.jit(pad_batch, out_shardings=jax.tree.map(lambda x: x.sharding, spec))


def _cut(leaf: jax.ShapeDtypeStruct, now: Bucket, then: Bucket) -> jax.ShapeDtypeStruct:
    """The shape that one of a batch's arrays has in another bucket."""
    shape = (now.batch_size, *leaf.shape[1:])
    if leaf.shape[1:2] == (then.seq_len,):
        shape = (*shape[:1], now.seq_len, *shape[2:])
    return jax.ShapeDtypeStruct(shape, leaf.dtype)


def _shape(leaf: Any) -> Any:
    if not hasattr(leaf, "dtype"):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
