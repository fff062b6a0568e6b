"""Options that several commands share: limits of shapes, costs of steps, names."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

import click

from jaxbucket.base.bucket import Bucket
from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.policies import OVERLONG
from jaxbucket.base.ratio import MaxRatio
from jaxbucket.cli.per_column import PerColumn
from jaxbucket.plan.costs import CostFn, StepTime, TokenCost, TransformerCost
from jaxbucket.plan.limits import Budget, Limits, costed

POSITIVE = click.IntRange(min=1)
EXISTING = click.Path(exists=True, dir_okay=False, path_type=pathlib.Path)
NEW = click.Path(dir_okay=False, writable=True, path_type=pathlib.Path)
_INTEGER = re.compile(r"\d+(_\d+)*")
# An integer whose digits are grouped by commas.
_THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+")
_RATE = click.FloatRange(min=0, min_open=True)


_SIZE = PerColumn(click.IntRange(min=1))


def _check_unit(_: click.Context, __: click.Parameter, unit: str) -> str:
    if not unit.strip():
        raise click.BadParameter("Pass the name of the unit, for example bytes.")
    return unit


unit_option = click.option(
    "--unit",
    metavar="NAME",
    default="tokens",
    callback=_check_unit,
    help="Unit of lengths in tables and plots, for example bytes.",
)
block_sparse_option = click.option(
    "--block-sparse",
    is_flag=True,
    help="For packed rows, count attention within examples only, not over whole rows.",
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print the results as JSON."
)

_OPTIONS = [
    click.option(
        "--max-tokens",
        metavar="TOKENS",
        type=PerColumn(POSITIVE, click.STRING),
        help="Maximum B * T, including padding: one number, one per boundary (for "
        "example 65536,32768), or a function of T as module:function. With several "
        "columns, T is the sum over all of them; or pass one number for each, as in "
        "source=32768,target=16384.",
    ),
    click.option(
        "--batch-size-multiple",
        type=POSITIVE,
        default=1,
        help="Make every B a multiple of this.",
    ),
    click.option(
        "--seq-len-multiple",
        type=_SIZE,
        default=1,
        help="Make every T a multiple of this; with several columns, one number for "
        "all or one for each, as in source=64,target=16.",
    ),
    click.option(
        "--max-seq-len",
        type=_SIZE,
        help="T of the last bucket; by default the longest length, rounded up. With "
        "several columns, one number for all or one for each.",
    ),
    click.option(
        "--min-batch-size",
        type=POSITIVE,
        default=1,
        help="Minimum B.",
    ),
    click.option("--max-batch-size", type=POSITIVE, help="Maximum B."),
    click.option(
        "--accumulate",
        type=POSITIVE,
        default=1,
        help="Micro-batches per step, all of the same bucket.",
    ),
    click.option(
        "--sample",
        is_flag=True,
        help="The lengths are a sample of more examples, such as of a stream: make "
        "every B as large as possible, even if the sample does not fill it.",
    ),
    click.option(
        "--overlong",
        type=PerColumn(click.Choice(OVERLONG)),
        default="error",
        help="What to do with examples longer than the last bucket; truncate keeps "
        "their first tokens, and truncate_left the last. With several columns, one "
        "choice for all or one for each, as in source=drop,target=truncate.",
    ),
    click.option(
        "--max-ratio",
        metavar="RATIO",
        type=PerColumn(_RATE),
        help="With several columns, leave out examples in which one is more than this "
        "many times as long as another: one number for all pairs, or one for some, as "
        "in source/target=2.5,target/source=4.",
    ),
    click.option(
        "--width",
        type=POSITIVE,
        help="Use the operations of a transformer of this width as the cost. Requires "
        "--depth.",
    ),
    click.option("--depth", type=POSITIVE, help="Number of layers of the transformer."),
    click.option(
        "--vocab-size",
        type=POSITIVE,
        help="Vocabulary size of the transformer. By default, the output layer is not "
        "counted.",
    ),
    click.option(
        "--per-second",
        metavar="RATE",
        type=_RATE,
        help="Throughput of the machine in tokens per second, or in operations per "
        "second with --width. Costs are then in seconds.",
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
      limit_values: the fields of `Limits` except `cost_fn`, or a dict of values by
        column; `max_tokens` is a string, or such a dict.
      cost_values: the arguments of `_cost_fn`.
      max_ratio: the field of `SequenceLimits`.
    """

    limit_values: dict[str, Any]
    cost_values: dict[str, Any]
    max_ratio: MaxRatio | None = None

    def limits(self) -> Limits:
        """Returns the limits of shapes, with the cost of a step.

        Raises:
          ValueError: if `--max-tokens` is missing or a value is out of range.
        """
        values = {**self.limit_values, "max_tokens": self.max_tokens}
        return Limits(**values, cost_fn=self.cost_fn)

    @property
    def max_tokens(self) -> Budget | dict[str, int]:
        """The value of `--max-tokens`.

        Raises:
          ValueError: if it is missing, or `token_budget` raises it.
        """
        budget = self.limit_values["max_tokens"]
        if budget is None:
            raise ValueError(
                "`--max-tokens` is missing. Pass the maximum B * T, for example "
                "`--max-tokens 65536`."
            )
        return budget if isinstance(budget, dict) else token_budget(budget)

    def check_one_length(self) -> None:
        """Raises a ValueError for limits that require several columns."""
        if self.max_ratio is not None:
            raise ValueError(
                "`--max-ratio` requires several columns. Remove it, or pass each "
                "`--column`."
            )
        for name, value in self.limit_values.items():
            if isinstance(value, dict):
                raise ValueError(
                    f"`--{name.replace('_', '-')}` has a value for each of several "
                    "columns. Pass one value, or each `--column`."
                )

    @functools.cached_property
    def cost_fn(self) -> CostFn | None:
        """The cost of a step; None counts tokens."""
        return _cost_fn(**self.cost_values)

    def check_free(self) -> None:
        """Raises a ValueError for limits of B or T, because `--shapes` defines both."""
        free = {"min_batch_size": 1, "max_batch_size": None, "max_seq_len": None}
        for name, value in free.items():
            if self.limit_values[name] != value:
                raise ValueError(
                    f"`--{name.replace('_', '-')}` has no effect with `--shapes`. "
                    "Remove it."
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
                    "`--shapes` already defines B, so `--max-tokens` must be a single "
                    "number. Pass one number, or remove it."
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
        ratio = options.pop("max_ratio")
        return command(shape=ShapeOptions(limits, costs, ratio), **options)

    for option in reversed(_OPTIONS):
        with_shape = option(with_shape)
    return with_shape


def token_budget(text: str) -> Budget:
    """Returns the value of `--max-tokens`: an integer, a list of them or a function.

    Raises:
      ValueError: if it is none of these, or a list with a number that is not positive,
        such as 48,000 with a comma.
    """
    numbers = integers(text)
    if numbers is None:
        return _function("--max-tokens", text)
    if len(numbers) == 1:
        return numbers[0]
    if 0 in numbers:
        *first, last = map(str, numbers)
        remedy = "Pass positive numbers."
        if _THOUSANDS.fullmatch(text):
            remedy = f"Write {text.replace(',', '')} without commas."
        raise ValueError(
            f"`--max-tokens {text}` is a list of budgets, {', '.join(first)} and "
            f"{last}. {remedy}"
        )
    return numbers


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
    given = [f"`{name}`" for name, value in sources.items() if value]
    if len(given) > 1:
        raise ValueError(
            f"{' and '.join(given)} each define the cost of a step. Pass only one of "
            "them."
        )
    if per_second and (step_times or cost_fn):
        raise ValueError(f"`--per-second` has no effect with {given[0]}. Remove it.")
    if step_times:
        return read_step_times(step_times)
    if cost_fn:
        return _function("--cost-fn", cost_fn)
    if by_model:
        if not (width and depth):
            raise ValueError(
                "The cost of a transformer requires `--width` and `--depth`. Pass both."
            )
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
            raise ValueError("it is not an object")
        shapes = [tuple(json.loads(shape)) for shape, _ in pairs]
        if not all(len(s) == 2 and all(type(n) is int for n in s) for s in shapes):
            raise ValueError("each shape must be two integers")
        if len(set(shapes)) < len(shapes):
            raise ValueError("a shape is repeated")
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
            f"`{option} {text}` is neither an integer nor a function. Pass integers, "
            "or a function as module:function."
            if option == "--max-tokens"
            else f"`{option} {text}` is not a function. Pass module:function."
        )
    return load_function(text)


def integers(text: str) -> list[int] | None:
    """Returns comma-separated integers, or None if a part is not an integer.

    As in Python, digits may be grouped by underscores, for example 48_000.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(map(_INTEGER.fullmatch, parts)):
        return None
    return [int(part) for part in parts]


def _shapes(text: str) -> list[tuple[int, int]]:
    """Returns the shapes of a string such as 32x128,16x256."""
    pairs = [integers(part.lower().replace("x", ",")) for part in text.split(",")]
    shapes = [(pair[0], pair[1]) for pair in pairs if pair and len(pair) == 2]
    if len(shapes) < len(pairs):
        raise ValueError(
            f"`--shapes {text}` is not a list of B x T. Pass shapes such as "
            "32x128,16x256."
        )
    return shapes
