"""Compiles the shapes of a plan before a job starts.

A recipe is a function that returns the arguments that the job will pass to
`compile_steps`: `recipe(plan) -> (step_fn, state, specs)`, or a dict of such triples by
name, for example for training and evaluation. Its state may consist of shapes, dtypes
and shardings only, such as `replicate(jax.eval_shape(...), mesh)`, so that nothing is
initialized.
"""

from __future__ import annotations

import dataclasses
import inspect
import pathlib
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.compile.agreement import report_failure_to_all
from jaxbucket.compile.cache_file import check_writable
from jaxbucket.compile.check_step import check_step, short
from jaxbucket.compile.executable_cache import ExecutableCache
from jaxbucket.compile.options import CompileOptions
from jaxbucket.compile.report import CompileReport, ProgramReport
from jaxbucket.compile.steps import compile_by

Recipe: TypeAlias = Callable[..., Any]
_REMEDY = (
    "It must return (step_fn, state, specs), the arguments of `compile_steps`, or a "
    "dict of such triples."
)


@dataclasses.dataclass(frozen=True)
class Failure:
    """A program that did not compile.

    Attributes:
      step: the name of the step in the recipe's dict.
      label: the bucket's `[B, T]`, or the name of the phase.
      error: the type of the error, and the first line of its message.
    """

    step: str
    label: str
    error: str


@dataclasses.dataclass(frozen=True)
class Precompiled:
    """The result of `precompile`.

    Attributes:
      report: the seconds, bytes and operations of each program.
      failures: the programs that did not compile.
      seconds: the total time.
    """

    report: CompileReport
    failures: tuple[Failure, ...]
    seconds: float

    def not_saved(self) -> list[str]:
        """Returns the programs without a file, which the job will compile again."""
        return [f"{p.name} {p.label}" for p in self.report.programs if p.file is None]

    def above_memory(self, memory_gb: float) -> list[str]:
        """Returns the programs whose peak memory is above a limit, or unknown.

        Args:
          memory_gb: the limit per device, in units of 1e9 bytes.
        """
        return [
            f"{p.name} {p.label}"
            for p in self.report.programs
            if p.peak_bytes is None or p.peak_bytes > memory_gb * 1e9
        ]

    def to_dict(self) -> dict[str, Any]:
        """Returns all numbers as plain Python values."""
        return {
            "programs": self.report.to_dict(),
            "failures": [dataclasses.asdict(failure) for failure in self.failures],
            "seconds": self.seconds,
        }


def precompile(
    recipe: Recipe,
    plan: BucketPlan,
    *arguments: str,
    executables: ExecutableCache | None = None,
    workers: int | None = None,
    progress: bool = True,
) -> Precompiled:
    """Compiles every shape of a plan, including those after one that fails.

    Example:
      >>> import jax, numpy as np
      >>> import jaxbucket as jb
      >>> def recipe(plan):
      ...     mesh = jb.data_mesh()
      ...     state = jb.sharding.replicate(jax.ShapeDtypeStruct((), np.int32), mesh)
      ...     specs = jb.sharding.batch_specs(plan, {"x": np.ones(3, "f4")}, mesh)
      ...     return (lambda state, batch: state + batch.num_tokens), state, specs
      >>> done = precompile(recipe, jb.BucketPlan.from_shapes([(8, 4)]))
      >>> done.report, done.failures
      (<CompileReport: 1 programs, 1 compiled>, ())

    Args:
      recipe: called with the plan and the arguments; returns `(step_fn, state, specs)`,
        or a dict of such triples by name.
      plan: the plan with the shapes to compile.
      *arguments: arguments of the job, passed on to the recipe.
      executables: the folder in which executables are saved for the job.
      workers: the number of programs to compile at the same time; defaults to half the
        number of CPU cores.
      progress: whether to show a progress bar on a terminal.

    Returns:
      The report of the programs, and the programs that failed.

    Raises:
      ValueError: if the folder of `executables` cannot be written, or the recipe does
        not accept these arguments, raises an exception, or returns anything but such
        triples for all shapes of the plan.
    """
    _check_signature(recipe, arguments)
    start = time.perf_counter()
    options = CompileOptions(
        workers, (), executables, "raise", "ignore", progress, keep_going=True
    )
    programs, failures = [], []
    try:
        if executables is not None:
            check_writable("executables", pathlib.Path(executables.folder))
        for name, triple in _call(recipe, plan, arguments).items():
            steps = compile_by(options, *triple)
            programs += steps.report.programs
            failures += [
                Failure(name, str(label), _summary(error))
                for label, error in steps.failures.items()
            ]
    except BaseException as error:
        # Other processes may be waiting for programs that this one has not reached.
        report_failure_to_all(error)
        raise
    if executables is not None:
        folder = pathlib.Path(executables.folder)
        # Files may have been removed to make room for later ones.
        programs = [
            p if p.file and (folder / p.file).exists() else _without_file(p)
            for p in programs
        ]
    return Precompiled(
        CompileReport(tuple(programs)), tuple(failures), time.perf_counter() - start
    )


def _without_file(program: ProgramReport) -> ProgramReport:
    return dataclasses.replace(program, file=None)


def _check_signature(recipe: Recipe, arguments: tuple[str, ...]) -> None:
    try:
        inspect.signature(recipe).bind(None, *arguments)
    except TypeError as error:
        raise ValueError(
            f"`{_name(recipe)}`: The recipe cannot be called with the plan and "
            f"{list(arguments)}: {error}. Pass arguments that it accepts."
        ) from None
    except ValueError:
        # Some functions written in C have no signature. The call will show.
        return


def _call(
    recipe: Recipe, plan: BucketPlan, arguments: tuple[str, ...]
) -> Mapping[str, tuple[Any, Any, Any]]:
    """Returns the triples of a recipe by name.

    Raises:
      ValueError: if the recipe raises an exception, or returns an invalid value.
    """
    try:
        returned = recipe(plan, *arguments)
    except Exception as error:
        raise ValueError(
            f"`{_name(recipe)}`: The recipe raised {_summary(error)} "
            f"({_place(recipe, error)}). It was called with the plan and "
            f"{list(arguments)}."
        ) from error
    steps = returned if isinstance(returned, Mapping) else {"step": returned}
    try:
        _check_steps(steps, plan)
    except ValueError as error:
        raise ValueError(f"`{_name(recipe)}`: The recipe returned {error}") from None
    return steps


def _place(recipe: Recipe, error: Exception) -> str:
    """Returns the last line of the recipe's own file in an exception's traceback."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    code = getattr(inspect.unwrap(recipe), "__code__", None)
    in_file = [frame for frame in frames if code and frame.filename == code.co_filename]
    if not frames:
        return "when it was called"
    frame = (in_file or frames)[-1]
    return f"{frame.filename}:{frame.lineno}, in {frame.name}"


def _check_steps(steps: Mapping[Any, Any], plan: BucketPlan) -> None:
    if not steps:
        raise ValueError(f"no steps, so there is nothing to compile. {_REMEDY}")
    for name, triple in steps.items():
        if not isinstance(triple, tuple) or len(triple) != 3:
            raise ValueError(f"{short(triple)} for {name!r}. {_REMEDY}")
        try:
            check_step(*triple)
        except ValueError as error:
            raise ValueError(
                f"an invalid triple for {name!r}: {error} {_REMEDY}"
            ) from None
    # The evaluation step may use the buckets of a different plan.
    specs = {bucket for _, _, specs in steps.values() for bucket in specs}
    missing = [str(bucket) for bucket in plan.buckets if bucket not in specs]
    if missing:
        raise ValueError(
            f"`specs` without {', '.join(missing)}, which the plan has. Compute them "
            "from the plan that is passed in: `jb.sharding.batch_specs(plan, example, "
            "mesh)`."
        )


def _name(recipe: Recipe) -> str:
    name = getattr(recipe, "__qualname__", type(recipe).__name__)
    return f"{getattr(recipe, '__module__', '?')}:{name}"


def _summary(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
