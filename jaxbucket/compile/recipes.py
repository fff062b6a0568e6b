"""Compiling the shapes of a plan for a job that is yet to come.

A recipe is a function that gives what the job will give to `compile_steps`:
`recipe(plan) -> (step_fn, state, specs)`, or a dict of such triples by name, for
training and evaluation. Its state may be of shapes, dtypes and shardings alone, as
`replicate(jax.eval_shape(...), mesh)` has them: nothing is initialised.
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
from jaxbucket.compile.agreement import leave_all
from jaxbucket.compile.check_step import check_step, short
from jaxbucket.compile.executable_cache import ExecutableCache
from jaxbucket.compile.options import CompileOptions
from jaxbucket.compile.report import CompileReport, ProgramReport
from jaxbucket.compile.steps import compile_by

Recipe: TypeAlias = Callable[..., Any]
_REMEDY = (
    "Have it return (step_fn, state, specs), as `compile_steps` takes them, or a dict "
    "of such triples."
)


@dataclasses.dataclass(frozen=True)
class Failure:
    """A program that did not compile.

    Attributes:
      step: which of the recipe's steps.
      label: the bucket's `[B, T]`, or the phase.
      error: its type, and the first line of its message.
    """

    step: str
    label: str
    error: str


@dataclasses.dataclass(frozen=True)
class Precompiled:
    """What was compiled or loaded, and what was not.

    Attributes:
      report: seconds, bytes and operations of each program.
      failures: the programs that did not compile.
      seconds: what it took in all.
    """

    report: CompileReport
    failures: tuple[Failure, ...]
    seconds: float

    def not_kept(self) -> list[str]:
        """The programs that are in no file, for the job to compile once more."""
        return [f"{p.name} {p.label}" for p in self.report.programs if p.file is None]

    def above(self, memory_gb: float) -> list[str]:
        """The programs whose peak is above so many 1e9 bytes of a device, or unknown.

        What a backend does not tell is not within a limit.
        """
        return [
            f"{p.name} {p.label}"
            for p in self.report.programs
            if p.peak_bytes is None or p.peak_bytes > memory_gb * 1e9
        ]

    def to_dict(self) -> dict[str, Any]:
        """Every number, as plain Python."""
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
    """Compiles every shape of a plan; one that fails does not keep the others.

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
      (<1 programs, 1 of them compiled>, ())

    Args:
      recipe: called with the plan and the arguments; returns `(step_fn, state, specs)`,
        or a dict of such triples by name.
      plan: the shapes.
      arguments: of the job, handed on to the recipe.
      executables: where they are kept, for the job to find.
      workers: how many are compiled at a time; by default one for two cores.
      progress: show a progress bar on a terminal.

    Raises:
      ValueError: if the recipe does not take these arguments, raises an exception, or
        returns something else: no such triples, or not for all shapes of the plan.
    """
    _check_takes(recipe, arguments)
    start = time.perf_counter()
    options = CompileOptions(
        workers, (), executables, "raise", "ignore", progress, keep_going=True
    )
    programs, failures = [], []
    try:
        for name, triple in _call(recipe, plan, arguments).items():
            steps = compile_by(options, *triple)
            programs += steps.report.programs
            failures += [
                Failure(name, str(label), _summary(error))
                for label, error in steps.failures.items()
            ]
    except BaseException as error:
        # Other processes may wait for what this one has not come to.
        leave_all(error)
        raise
    if executables is not None:
        folder = pathlib.Path(executables.folder)
        # Some had to make room for others.
        programs = [
            p if p.file and (folder / p.file).exists() else _without_file(p)
            for p in programs
        ]
    return Precompiled(
        CompileReport(tuple(programs)), tuple(failures), time.perf_counter() - start
    )


def _without_file(program: ProgramReport) -> ProgramReport:
    return dataclasses.replace(program, file=None)


def _check_takes(recipe: Recipe, arguments: tuple[str, ...]) -> None:
    try:
        inspect.signature(recipe).bind(None, *arguments)
    except TypeError as error:
        raise ValueError(
            f"`{_name(recipe)}`: The recipe is called with the plan and "
            f"{list(arguments)}: {error}. Give it other arguments."
        ) from None
    except ValueError:
        # Some functions of C have no signature: calling them tells.
        return


def _call(
    recipe: Recipe, plan: BucketPlan, arguments: tuple[str, ...]
) -> Mapping[str, tuple[Any, Any, Any]]:
    """Returns the steps of a recipe, by name.

    Raises:
      ValueError: if it raises an exception, or returns something else.
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
    """The last line of the recipe's own file that an exception came through."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    code = getattr(inspect.unwrap(recipe), "__code__", None)
    in_file = [frame for frame in frames if code and frame.filename == code.co_filename]
    if not frames:
        return "when it was called"
    frame = (in_file or frames)[-1]
    return f"{frame.filename}:{frame.lineno}, in {frame.name}"


def _check_steps(steps: Mapping[Any, Any], plan: BucketPlan) -> None:
    if not steps:
        raise ValueError(f"no steps: there is nothing to compile. {_REMEDY}")
    for name, triple in steps.items():
        if not isinstance(triple, tuple) or len(triple) != 3:
            raise ValueError(f"{short(triple)} for {name!r}. {_REMEDY}")
        try:
            check_step(*triple)
        except ValueError as error:
            raise ValueError(
                f"something else for {name!r}: {error} {_REMEDY}"
            ) from None
    # An evaluation may have a plan of its own beside it.
    specs = {bucket for _, _, specs in steps.values() for bucket in specs}
    missing = [str(bucket) for bucket in plan.buckets if bucket not in specs]
    if missing:
        raise ValueError(
            f"`specs` without {', '.join(missing)}, which the plan has. Make them from "
            "the plan that it is called with: `jb.sharding.batch_specs(plan, example, "
            "mesh)`."
        )


def _name(recipe: Recipe) -> str:
    name = getattr(recipe, "__qualname__", type(recipe).__name__)
    return f"{getattr(recipe, '__module__', '?')}:{name}"


def _summary(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
