"""Options, and types of their values, that several commands share."""

from __future__ import annotations

import contextlib
import importlib
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any, get_args

import click

from jaxbucket.base.policies import GROUPS
from jaxbucket.cli.output import note_input
from jaxbucket.plan.flow.remainder import Remainder


def integer(text: Any) -> int:
    """Returns an integer, in which "k" stands for 1,024 and "M" for 1,024**2.

    Example:
      >>> integer("64k"), integer("48000")
      (65536, 48000)
    """
    text = str(text)
    factor = {"k": 2**10, "m": 2**20}.get(text[-1:].lower())
    return int(text[:-1]) * factor if factor else int(text)


class _Positive(click.IntRange):
    """Positive integers, which may be written as in 64k."""

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        with contextlib.suppress(ValueError):
            value = integer(value)
        return super().convert(value, param, ctx)


class Each(click.ParamType):
    """A value of a type, or one for each sequence, as in source=8,target=4."""

    def __init__(self, kind: click.ParamType):
        self.kind = kind
        self.name = kind.name

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str | None:
        """Returns what the help shows in place of a value."""
        return self.kind.get_metavar(param, ctx)

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Returns the value, or a dict of values by name."""
        if "=" not in str(value):
            return self.kind.convert(value, param, ctx)
        parts = [part.partition("=") for part in value.split(",")]
        values = {x: self.kind.convert(y, param, ctx) for x, _, y in parts}
        if len(values) < len(parts):
            self.fail(f"{value!r} names a sequence twice.", param, ctx)
        return values


POSITIVE = _Positive(min=1)


class Input(click.Path):
    """The path of a file that a command reads."""

    def __init__(self, **options: Any):
        options = {"exists": True, "path_type": pathlib.Path} | options
        super().__init__(dir_okay=False, **options)

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Returns the path, which no output may overwrite."""
        path = super().convert(value, param, ctx)
        note_input(path)
        return path


EXISTING = Input()
NEW = click.Path(dir_okay=False, writable=True, path_type=pathlib.Path)
RATE = click.FloatRange(min=0, min_open=True)


def all_of(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a decorator that adds several options to a command."""

    def add(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return add


form_option = all_of(
    click.option("--json", "form", flag_value="json", help="Print results as JSON."),
    click.option(
        *("--quiet", "-q", "form"),
        flag_value="quiet",
        help="Print tables without explanations of their columns.",
    ),
)
plot_option = click.option("--plot", type=NEW, help="Draw a plot to this file.")
unit_option = click.option(
    "--unit",
    metavar="NAME",
    default="tokens",
    help="Unit of lengths in tables and plots, for example bytes.",
)
block_sparse_option = click.option(
    "--block-sparse",
    is_flag=True,
    help="For packed rows, count attention within examples only, not over whole rows.",
)
remainder_option = click.option(
    "--remainder",
    type=click.Choice(get_args(Remainder)),
    default="cheapest",
    help="What to do with examples that do not fill a batch.",
)
accumulate_option = click.option(
    "--accumulate", type=POSITIVE, default=1, help="Micro-batches per step."
)
group_option = click.option(
    "--group",
    type=click.Choice(GROUPS),
    default="same",
    help="Whether all micro-batches of a step have the same bucket, or may have "
    "different ones.",
)
recipe_options = all_of(
    click.option(
        "--recipe",
        required=True,
        metavar="MODULE:FUNCTION",
        help="A function of the plan that returns (step_fn, state, specs), or a dict "
        "whose values are such triples.",
    ),
    click.option(
        "--topology",
        metavar="TYPE:LAYOUT",
        help="Compile for devices that are not there, such as v5e:16x16 or h100:1x1x8.",
    ),
    click.option(
        "--num-slices",
        type=POSITIVE,
        default=1,
        help="Number of slices of this --topology of TPUs.",
    ),
    click.option(
        *("--memory-gb", "memory_bytes"),
        type=RATE,
        callback=lambda context, option, number: number and number * 1e9,
        help="Memory per device that programs may use, in GB (1e9 bytes). By default "
        "what jax may use on GPUs, and what XLA accepts on TPUs.",
    ),
    click.option(
        "--workers",
        type=POSITIVE,
        help="Number of programs to compile in parallel. Defaults to half the number "
        "of cores.",
    ),
    click.argument("arguments", nargs=-1),
)


def using_topology(
    topology: str | None, num_slices: int
) -> contextlib.AbstractContextManager[Any]:
    """Lets recipes use the devices of `--topology`, if there is one."""
    from jaxbucket.compile.absent import absent_devices

    if topology is not None:
        return absent_devices(topology, num_slices=num_slices)
    if num_slices > 1:
        raise ValueError("`num_slices` requires `topology`, such as v5e:16x16.")
    return contextlib.nullcontext()


def load_function(name: str) -> Callable[..., Any]:
    """Loads a function named as `module:function`.

    Example:
      >>> load_function("math:sqrt")(9)
      3.0
    """
    found = load(name, "function")
    if not callable(found):
        raise ValueError(f"`{name}` is of {type(found)}. Name a function.")
    return found


def load(name: str, kind: str) -> Any:
    """Loads a value named as `module:name`, also from a module in the current folder.

    Example:
      >>> load("string:digits", "text")
      '0123456789'
    """
    module, _, path = name.partition(":")
    # Added permanently, because later imports and workers may need the folder, too.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise ValueError(
            f"`{name}` cannot be loaded as `module:{kind}`: {type(error).__name__}: "
            f"{error}. Run this in the folder of the module, or fix the module."
        ) from error
    return found
