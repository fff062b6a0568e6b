"""Options that several commands have: limits of shapes, and costs of steps."""

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
    "--column", help="Which array, column or field, if several."
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print every number as JSON."
)

_OPTIONS = [
    click.option(
        "--max-tokens",
        metavar="TOKENS",
        help="B * T at most; or one for each boundary, such as 65536,32768; or a "
        "module:function of T.",
    ),
    click.option(
        "--batch-size-multiple",
        type=POSITIVE,
        default=1,
        help="Every B is a multiple of it.",
    ),
    click.option(
        "--seq-len-multiple",
        type=POSITIVE,
        default=1,
        help="Every T is a multiple of it.",
    ),
    click.option("--max-seq-len", type=POSITIVE, help="T of the last bucket."),
    click.option(
        "--min-batch-size",
        type=POSITIVE,
        default=1,
        help="The fewest rows of a batch.",
    ),
    click.option("--max-batch-size", type=POSITIVE, help="The most rows of a batch."),
    click.option(
        "--accumulate",
        type=POSITIVE,
        default=1,
        help="Micro-batches of a step, of the same bucket.",
    ),
    click.option(
        "--overlong",
        type=click.Choice(OVERLONG),
        default="error",
        help="What happens to longer examples.",
    ),
    click.option(
        "--width", type=POSITIVE, help="Width of a transformer, for its costs."
    ),
    click.option("--depth", type=POSITIVE, help="Layers of the transformer."),
    click.option(
        "--vocab-size", type=POSITIVE, help="Outputs of the transformer for a position."
    ),
    click.option(
        "--per-second",
        metavar="RATE",
        type=_RATE,
        help="Positions, or operations with --width, that the machine does.",
    ),
    click.option(
        "--step-times",
        metavar="FILE",
        type=EXISTING,
        help='Measured seconds of steps, as JSON: {"[8, 512]": 0.21, ...}.',
    ),
    click.option(
        "--cost-fn",
        metavar="MODULE:FUNCTION",
        help="A function of (B, T): the cost of a step.",
    ),
]


@dataclasses.dataclass(frozen=True)
class ShapeOptions:
    """The values of the options; files and functions are loaded on first use.

    Attributes:
      limit_values: the fields of `Limits` but `cost_fn`; `max_tokens` as a text.
      cost_values: the arguments of `_cost_fn`.
    """

    limit_values: dict[str, Any]
    cost_values: dict[str, Any]

    def limits(self) -> Limits:
        """Returns the limits and the costs of shapes."""
        if self.limit_values["max_tokens"] is None:
            raise ValueError(
                "`--max-tokens` is missing: say what B * T may be at most, such as "
                "`--max-tokens 65536`."
            )
        budget = _budget(self.limit_values["max_tokens"])
        return Limits(
            **{**self.limit_values, "max_tokens": budget}, cost_fn=self.cost_fn
        )

    @functools.cached_property
    def cost_fn(self) -> CostFn | None:
        """What a step costs; None counts tokens."""
        return _cost_fn(**self.cost_values)

    def check_free(self) -> None:
        """Raises a ValueError for limits of B or T, which `--shapes` fix."""
        free = {"min_batch_size": 1, "max_batch_size": None, "max_seq_len": None}
        for name, value in free.items():
            if self.limit_values[name] != value:
                raise ValueError(
                    f"`--{name.replace('_', '-')}` says nothing beside `--shapes`: "
                    "leave it out."
                )

    @property
    def accumulate(self) -> int:
        """Micro-batches of a step."""
        return self.limit_values["accumulate"]

    @property
    def inputs(self) -> list[pathlib.Path]:
        """Files that are read."""
        path = self.cost_values["step_times"]
        return [path] if path else []

    def fixed_plan(self, text: str) -> BucketPlan:
        """Returns the plan of shapes such as 32x128,16x256, costed."""
        names = ("batch_size_multiple", "seq_len_multiple", "overlong")
        fields = {name: self.limit_values[name] for name in names}
        if self.limit_values["max_tokens"] is not None:
            budget = self.limits().max_tokens
            if not isinstance(budget, int):
                raise ValueError(
                    "`--shapes` say their own B: give one `--max-tokens` beside them, "
                    "or none."
                )
            fields["max_tokens"] = budget
        plan = BucketPlan.from_shapes(_shapes(text), **fields)
        return costed(plan, self.cost_fn)


_LIMIT_NAMES = {field.name for field in dataclasses.fields(Limits)} - {"cost_fn"}


def shape_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options to a command, which is called with their values as `shape`."""

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
        raise ValueError(f"{' and '.join(ways)} are two costs: give one of them.")
    if per_second and (step_times or cost_fn):
        raise ValueError(f"`--per-second` says nothing beside {ways[0]}: leave it out.")
    if step_times:
        return read_step_times(step_times)
    if cost_fn:
        return _function("--cost-fn", cost_fn)
    if by_model:
        if not (width and depth):
            raise ValueError("A transformer's cost takes `--width` and `--depth`.")
        return TransformerCost(width, depth, vocab_size or 0, per_second)
    return TokenCost(per_second) if per_second else None


_COST_NAMES = inspect.signature(_cost_fn).parameters


def read_step_times(path: pathlib.Path) -> StepTime:
    """Returns the cost that fits the step times in a file, shape -> seconds.

    Raises:
      ValueError: if it holds no such thing.
    """
    try:
        pairs = json.loads(path.read_text("utf-8"), object_pairs_hook=tuple)
        if not isinstance(pairs, tuple):
            raise ValueError("it is none")
        shapes = [tuple(json.loads(shape)) for shape, _ in pairs]
        if not all(len(s) == 2 and all(type(n) is int for n in s) for s in shapes):
            raise ValueError("a shape is two integers")
        if len(set(shapes)) < len(shapes):
            raise ValueError("a shape is there twice")
        seconds = {Bucket(*s): time for s, (_, time) in zip(shapes, pairs, strict=True)}
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"`--step-times {path}` is no JSON object of shapes and seconds, such as "
            f'{{"[8, 512]": 0.21}}: {str(error).rstrip(".")}.'
        ) from None
    return StepTime.fit(seconds)


def _function(option: str, text: str) -> Callable[..., Any]:
    from jaxbucket.data.lengths.functions import is_function_name, load_function

    if not is_function_name(text):
        raise ValueError(
            f"`{option} {text}`: give integers, or a function as module:function."
            if option == "--max-tokens"
            else f"`{option} {text}`: name a function as module:function."
        )
    return load_function(text)


def integers(text: str) -> list[int] | None:
    """Returns the integers between commas, None where something else is."""
    parts = text.split(",")
    # Not `isdigit`, which takes superscripts for digits.
    decimal = all(part.strip().isdecimal() for part in parts)
    return [int(part) for part in parts] if decimal else None


def _shapes(text: str) -> list[tuple[int, int]]:
    """Returns the shapes of a text such as 32x128,16x256."""
    pairs = [integers(part.lower().replace("x", ",")) for part in text.split(",")]
    shapes = [(pair[0], pair[1]) for pair in pairs if pair and len(pair) == 2]
    if len(shapes) < len(pairs):
        raise ValueError(f"`--shapes {text}`: give B x T for each, as 32x128,16x256.")
    return shapes
