"""Options that several commands share: limits of shapes, costs of steps, names."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import pathlib
from collections.abc import Callable
from typing import Any

import click

from jaxbucket.base.buckets import OVERLONG, Bucket, BucketPlan
from jaxbucket.plan.costs import CostFn, StepTime, TokenCost, TransformerCost
from jaxbucket.plan.limits import Budget, Limits, costed

POSITIVE = click.IntRange(min=1)
EXISTING = click.Path(exists=True, dir_okay=False, path_type=pathlib.Path)
NEW = click.Path(dir_okay=False, writable=True, path_type=pathlib.Path)
_RATE = click.FloatRange(min=0, min_open=True)

column_option = click.option(
    "--column", help="The array, column or field to read if the file has several."
)


def _check_unit(_: click.Context, __: click.Parameter, unit: str) -> str:
    if not unit.strip():
        raise click.BadParameter("Name what lengths count, such as bytes.")
    return unit


unit_option = click.option(
    "--unit",
    metavar="NAME",
    default="tokens",
    callback=_check_unit,
    help="What lengths count, such as bytes: a name for tables and pictures.",
)
block_sparse_option = click.option(
    "--block-sparse",
    is_flag=True,
    help="Count the attention of packed rows within examples, not over whole rows.",
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print every number as JSON."
)

_OPTIONS = [
    click.option(
        "--max-tokens",
        metavar="TOKENS",
        help="The largest B * T, padding included; or one for each boundary, such as "
        "65536,32768; or a module:function of T.",
    ),
    click.option(
        "--batch-size-multiple",
        type=POSITIVE,
        default=1,
        help="Make every B a multiple of this.",
    ),
    click.option(
        "--seq-len-multiple",
        type=POSITIVE,
        default=1,
        help="Make every T a multiple of this.",
    ),
    click.option(
        "--max-seq-len",
        type=POSITIVE,
        help="T of the last bucket; by default the longest length, rounded up.",
    ),
    click.option(
        "--min-batch-size",
        type=POSITIVE,
        default=1,
        help="The smallest B.",
    ),
    click.option("--max-batch-size", type=POSITIVE, help="The largest B."),
    click.option(
        "--accumulate",
        type=POSITIVE,
        default=1,
        help="Micro-batches per step, all of the same bucket.",
    ),
    click.option(
        "--overlong",
        type=click.Choice(OVERLONG),
        default="error",
        help="What to do with examples longer than the last bucket.",
    ),
    click.option(
        "--width",
        type=POSITIVE,
        help="Count the operations of a transformer of this width; needs --depth.",
    ),
    click.option("--depth", type=POSITIVE, help="Layers of the transformer."),
    click.option(
        "--vocab-size",
        type=POSITIVE,
        help="Vocabulary of the transformer; by default its output layer is not "
        "counted.",
    ),
    click.option(
        "--per-second",
        metavar="RATE",
        type=_RATE,
        help="Tokens, or operations with --width, that the machine computes per "
        "second; costs are then in seconds.",
    ),
    click.option(
        "--step-times",
        metavar="FILE",
        type=EXISTING,
        help='Measured seconds per step of some shapes, as JSON: {"[8, 512]": 0.21}.',
    ),
    click.option(
        "--cost-fn",
        metavar="MODULE:FUNCTION",
        help="A function of (B, T) that returns the cost of a step.",
    ),
]


@dataclasses.dataclass(frozen=True)
class ShapeOptions:
    """The values of the options. Files and functions are loaded on first use.

    Attributes:
      limit_values: the fields of `Limits` except `cost_fn`; `max_tokens` is a string.
      cost_values: the arguments of `_cost_fn`.
    """

    limit_values: dict[str, Any]
    cost_values: dict[str, Any]

    def limits(self) -> Limits:
        """Returns the limits of shapes, with the cost of a step.

        Raises:
          ValueError: if `--max-tokens` is missing or a value is out of range.
        """
        if self.limit_values["max_tokens"] is None:
            raise ValueError(
                "`--max-tokens` is missing. Give the largest B * T, such as "
                "`--max-tokens 65536`."
            )
        budget = _budget(self.limit_values["max_tokens"])
        return Limits(
            **{**self.limit_values, "max_tokens": budget}, cost_fn=self.cost_fn
        )

    @functools.cached_property
    def cost_fn(self) -> CostFn | None:
        """The cost of a step; None counts tokens."""
        return _cost_fn(**self.cost_values)

    def check_free(self) -> None:
        """Raises a ValueError for limits of B or T, because `--shapes` fix both."""
        free = {"min_batch_size": 1, "max_batch_size": None, "max_seq_len": None}
        for name, value in free.items():
            if self.limit_values[name] != value:
                raise ValueError(
                    f"`--{name.replace('_', '-')}` has no effect with `--shapes`. "
                    "Leave it out."
                )

    @property
    def accumulate(self) -> int:
        """The number of micro-batches per step."""
        return self.limit_values["accumulate"]

    @property
    def inputs(self) -> list[pathlib.Path]:
        """The files that the options name."""
        path = self.cost_values["step_times"]
        return [path] if path else []

    def fixed_plan(self, text: str) -> BucketPlan:
        """Returns the plan of shapes such as 32x128,16x256, with its costs."""
        names = ("batch_size_multiple", "seq_len_multiple", "overlong")
        fields = {name: self.limit_values[name] for name in names}
        if self.limit_values["max_tokens"] is not None:
            budget = self.limits().max_tokens
            if not isinstance(budget, int):
                raise ValueError(
                    "`--shapes` fix B. Give one number as `--max-tokens`, or leave it "
                    "out."
                )
            fields["max_tokens"] = budget
        plan = BucketPlan.from_shapes(_shapes(text), **fields)
        return costed(plan, self.cost_fn)


_LIMIT_NAMES = {field.name for field in dataclasses.fields(Limits)} - {"cost_fn"}


def shape_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options to a command and passes it their values as `shape`."""

    @functools.wraps(command)
    def with_shape(**options: Any) -> Any:
        costs = {name: options.pop(name) for name in _COST_NAMES}
        limits = {name: options.pop(name) for name in _LIMIT_NAMES}
        return command(shape=ShapeOptions(limits, costs), **options)

    for option in reversed(_OPTIONS):
        with_shape = option(with_shape)
    return with_shape


def _budget(text: str) -> Budget:
    numbers = integers(text)
    if numbers is None:
        return _function("--max-tokens", text)
    return numbers[0] if len(numbers) == 1 else numbers


def _cost_fn(
    width: int | None,
    depth: int | None,
    vocab_size: int | None,
    per_second: float | None,
    step_times: pathlib.Path | None,
    cost_fn: str | None,
) -> CostFn | None:
    by_model = width or depth or vocab_size
    sources = {"--width": by_model, "--step-times": step_times, "--cost-fn": cost_fn}
    ways = [name for name, value in sources.items() if value]
    if len(ways) > 1:
        raise ValueError(f"{' and '.join(ways)} are two costs. Give one of them.")
    if per_second and (step_times or cost_fn):
        raise ValueError(f"`--per-second` has no effect with {ways[0]}. Leave it out.")
    if step_times:
        return read_step_times(step_times)
    if cost_fn:
        return _function("--cost-fn", cost_fn)
    if by_model:
        if not (width and depth):
            raise ValueError("A transformer's cost needs `--width` and `--depth`.")
        return TransformerCost(width, depth, vocab_size or 0, per_second)
    return TokenCost(per_second) if per_second else None


_COST_NAMES = inspect.signature(_cost_fn).parameters


def read_step_times(path: pathlib.Path) -> StepTime:
    """Returns the cost function fitted to the step times in a file.

    Args:
      path: a file with a JSON object, shape -> seconds.

    Raises:
      ValueError: if the file is not such an object.
    """
    try:
        pairs = json.loads(path.read_text("utf-8"), object_pairs_hook=tuple)
        if not isinstance(pairs, tuple):
            raise ValueError("it is something else")
        shapes = [tuple(json.loads(shape)) for shape, _ in pairs]
        if not all(len(s) == 2 and all(type(n) is int for n in s) for s in shapes):
            raise ValueError("a shape is two integers")
        if len(set(shapes)) < len(shapes):
            raise ValueError("a shape occurs twice")
        seconds = {Bucket(*s): time for s, (_, time) in zip(shapes, pairs, strict=True)}
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"`--step-times {path}` is not a JSON object of shapes and seconds, such "
            f'as {{"[8, 512]": 0.21}}: {str(error).rstrip(".")}.'
        ) from None
    return StepTime.fit(seconds)


def _function(option: str, text: str) -> Callable[..., Any]:
    from jaxbucket.data.lengths.functions import is_function_name, load_function

    if not is_function_name(text):
        raise ValueError(
            f"`{option} {text}` is neither an integer nor a function. Give integers, "
            "or a function as module:function."
            if option == "--max-tokens"
            else f"`{option} {text}` is not a function. Name it as module:function."
        )
    return load_function(text)


def integers(text: str) -> list[int] | None:
    """Returns comma-separated integers, or None if a part is not an integer."""
    parts = text.split(",")
    # Not `isdigit`, which accepts superscripts.
    decimal = all(part.strip().isdecimal() for part in parts)
    return [int(part) for part in parts] if decimal else None


def _shapes(text: str) -> list[tuple[int, int]]:
    """Returns the shapes of a text such as 32x128,16x256."""
    pairs = [integers(part.lower().replace("x", ",")) for part in text.split(",")]
    shapes = [(pair[0], pair[1]) for pair in pairs if pair and len(pair) == 2]
    if len(shapes) < len(pairs):
        raise ValueError(
            f"`--shapes {text}` is not a list of B x T. Give shapes such as "
            "32x128,16x256."
        )
    return shapes
