"""Compiling the shapes of a plan for a job that is yet to come.

A recipe is a function that gives what the job will give to `compile_steps`:
`recipe(plan) -> (step_fn, state, specs)`, or a dict of such triples by name, for
training and evaluation. Its state may be of shapes, dtypes and shardings alone, as
`replicate(jax.eval_shape(...), mesh)` has them: nothing is initialised.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from jaxbucket.base import BucketPlan
from jaxbucket.compile import (
    CompileOptions,
    CompileReport,
    ExecutableCache,
    ProgramReport,
    compile_by,
    leave_all,
)

Recipe: TypeAlias = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Failure:
    """A program that did not compile.

    Attributes:
      step: which of the recipe's steps.
      label: the bucket's `[B, T]`, or the phase.
      error: what was said.
    """

    step: str
    label: str
    error: str


@dataclasses.dataclass(frozen=True)
class Precompiled:
    """What was compiled, or found, and what was not.

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
        return [
            f"{program.name} {program.label}"
            for program in self.report.programs
            if program.file is None
        ]

    def above(self, memory_gb: float) -> list[str]:
        """The programs whose peak is above so many 1e9 bytes of a device, or unknown.

        What a backend does not tell is not within a limit.
        """
        return [
            f"{program.name} {program.label}"
            for program in self.report.programs
            if program.peak_bytes is None or program.peak_bytes > memory_gb * 1e9
        ]

    def to_dict(self) -> dict[str, Any]:
        """Every number, as plain Python."""
        return {
            "programs": self.report.to_dict(),
            "failures": [dataclasses.asdict(failure) for failure in self.failures],
            "seconds": self.seconds,
        }

    def to_json(self) -> str:
        """Every number, as JSON."""
        return json.dumps(self.to_dict())


def precompile(
    recipe: Recipe,
    plan: BucketPlan,
    *arguments: str,
    executables: ExecutableCache | None = None,
    workers: int | None = None,
    progress: bool = True,
) -> Precompiled:
    """Compiles every shape of a plan; one that fails does not keep the others.

    Args:
      recipe: called with the plan and the arguments.
      plan: the shapes.
      arguments: of the job, handed on to the recipe.
      executables: where they are kept, for the job to find.
      workers: how many are compiled at a time; by default one for two cores.
      progress: show a progress bar on a terminal.

    Raises:
      ValueError: if the recipe does not take these arguments, or returns anything else.
    """
    _check_takes(recipe, arguments)
    start = time.perf_counter()
    options = CompileOptions(
        workers, (), executables, "raise", "ignore", progress, keep_going=True
    )
    programs, failures = [], []
    try:
        for name, triple in _steps(recipe(plan, *arguments)).items():
            steps = compile_by(options, *triple)
            programs += steps.report.programs
            failures += [
                Failure(name, str(label), _said(error))
                for label, error in steps.failures.items()
            ]
    except BaseException as error:
        # Other processes may wait for what this one has not come to.
        leave_all(error)
        raise
    if executables is not None:
        programs = [_as_it_is(program, executables) for program in programs]
    return Precompiled(
        CompileReport(tuple(programs)), tuple(failures), time.perf_counter() - start
    )


def _as_it_is(program: ProgramReport, executables: ExecutableCache) -> ProgramReport:
    """Without its file, if that had to make room for another one."""
    folder = pathlib.Path(executables.folder)
    if program.file is None or (folder / program.file).exists():
        return program
    return dataclasses.replace(program, file=None)


def _check_takes(recipe: Recipe, arguments: tuple[str, ...]) -> None:
    try:
        inspect.signature(recipe).bind(None, *arguments)
    except TypeError as error:
        raise ValueError(
            f"The recipe is called with the plan and {list(arguments)}: {error}. Give "
            "it other arguments."
        ) from None


def _steps(made: Any) -> Mapping[str, tuple[Any, Any, Any]]:
    steps = made if isinstance(made, Mapping) else {"step": made}
    if not steps:
        raise ValueError("The recipe returned no steps: there is nothing to compile.")
    for name, triple in steps.items():
        if not isinstance(triple, tuple) or len(triple) != 3:
            raise ValueError(
                f"The recipe returned {type(triple).__name__} for {name!r}: return "
                "(step_fn, state, specs), as `compile_steps` takes them, or a dict of "
                "such triples."
            )
    return steps


def _said(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
