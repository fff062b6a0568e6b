"""Compiles the shapes of a plan before a job starts.

A recipe is a function that returns the arguments that the job will pass to
`compile_steps`: `recipe(plan) -> (step_fn, state, specs)`, or a dict of such triples by
name, for example for training and evaluation. Its state may consist of shapes, dtypes
and shardings only, such as `replicate(jax.eval_shape(...), mesh)`, so that nothing is
initialized.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.notes import Noting
from jaxbucket.compile.absent import current_absent_devices
from jaxbucket.compile.build import CompileOptions
from jaxbucket.compile.executables import make_writable
from jaxbucket.compile.report import CompileReport, devices_of
from jaxbucket.compile.steps import compile_with, short


def precompile(
    recipe: Callable[..., Any],
    plan: BucketPlan,
    *arguments: str,
    executables: str | os.PathLike[str] | None = None,
    executables_key: str = "",
    workers: int | None = None,
) -> tuple[CompileReport, dict[str, str]]:
    """Compiles every shape of a plan, including those after one that fails.

    Example:
      >>> import jax, numpy as np
      >>> import jaxbucket as jb
      >>> def recipe(plan):
      ...     mesh = jb.data_mesh()
      ...     state = jb.sharding.replicate(jax.ShapeDtypeStruct((), np.int32), mesh)
      ...     specs = jb.sharding.batch_specs(plan, {"x": np.ones(3, "f4")}, mesh)
      ...     return (lambda state, batch: state + batch.num_tokens), state, specs
      >>> precompile(recipe, jb.BucketPlan.from_shapes([(8, 4)]))
      (<CompileReport: 1 programs, 1 compiled>, {})

    Args:
      recipe: called with the plan and the arguments.
      plan: the plan with the shapes to compile.
      *arguments: arguments of the job, passed on to the recipe.
      executables, executables_key, workers: as for `compile_steps`.

    Returns:
      The seconds and bytes of each program; and the programs that did not compile, name
      and bucket -> the first line of the error.
    """
    options = CompileOptions(workers, executables, executables_key, keep_going=True)
    if executables is not None:
        make_writable(executables)
    programs, failures = [], {}
    for name, triple in call_recipe(recipe, plan, arguments).items():
        steps = compile_with(options, *triple)
        programs += steps.report.programs
        for label, error in steps.failures.items():
            summary = [type(error).__name__, *str(error).strip().splitlines()[:1]]
            failures[f"{name} {label}"] = ": ".join(summary)
    return CompileReport(tuple(programs)), failures


def call_recipe(
    recipe: Callable[..., Any], plan: BucketPlan, arguments: tuple[str, ...]
) -> Mapping[str, tuple[Any, Any, Any]]:
    """Returns the triples of a recipe by name."""
    name = f"`{recipe.__module__}:{getattr(recipe, '__qualname__', recipe)}`"
    note = f"The recipe {name} was called with the plan and {list(arguments)}."
    # Not by jax's devices: a recipe may set how many there are.
    absent = current_absent_devices()
    if absent:
        note += (
            " Absent devices hold no arrays: let it use `jb.create_state(..., mesh)`, "
            "`jb.sharding.replicate` or shapes."
        )
    with Noting(note):
        returned = recipe(plan, *arguments)
    steps = returned if isinstance(returned, Mapping) else {"step": returned}
    # The evaluation step may use the buckets of a different plan.
    specs = [x[2] for x in steps.values() if isinstance(x, tuple) and len(x) == 3]
    missing = [str(b) for b in plan.buckets if not any(b in x for x in specs)]
    if missing or len(specs) < len(steps):
        raise ValueError(
            f"The recipe {name} returned {short(returned)}. It must return (step_fn, "
            "state, specs), the arguments of `compile_steps`, or a dict of such "
            "triples, with specs from `jb.sharding.batch_specs(plan, example, mesh)` "
            f"for every shape of the plan. Missing are {', '.join(missing) or 'none'}."
        )
    others = {*devices_of(specs)} - {*absent} if absent else ()
    if others:
        raise ValueError(
            f"The recipe {name} uses {len(others)} devices that are there, not those "
            "of the topology. Make its mesh of `jb.data_mesh()`, or of the devices "
            "that `absent_devices` yields."
        )
    return steps
