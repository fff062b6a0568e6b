"""Options that say what shapes keep to and cost, as commands share them."""

from __future__ import annotations

import dataclasses
import functools
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

_LIMITS = [
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
        show_default=True,
        help="Of which every B is one.",
    ),
    click.option(
        "--seq-len-multiple",
        type=POSITIVE,
        default=1,
        show_default=True,
        help="Of which every T is one.",
    ),
    click.option("--max-seq-len", type=POSITIVE, help="T of the last bucket."),
    click.option(
        "--min-batch-size",
        type=POSITIVE,
        default=1,
        show_default=True,
        help="Rows that every batch must have.",
    ),
    click.option("--max-batch-size", type=POSITIVE, help="Rows that none may exceed."),
    click.option(
        "--accumulate",
        type=POSITIVE,
        default=1,
        show_default=True,
        help="Micro-batches of a step, of the same bucket.",
    ),
    click.option(
        "--overlong",
        type=click.Choice(OVERLONG),
        default="error",
        show_default=True,
        help="What happens to longer examples.",
    ),
]
_COSTS = [
    click.option("--width", type=POSITIVE, help="Of a transformer: costs count its."),
    click.option("--depth", type=POSITIVE, help="Its layers."),
    click.option("--vocab-size", type=POSITIVE, help="Its outputs for a position."),
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
        help="Of (B, T): what a step costs.",
    ),
]

_LIMIT_NAMES = (
    *("max_tokens", "batch_size_multiple", "seq_len_multiple", "max_seq_len"),
    *("min_batch_size", "max_batch_size", "overlong", "accumulate"),
)
_COST_NAMES = (
    *("width", "depth", "vocab_size"),
    *("per_second", "step_times", "cost_fn"),
)


@dataclasses.dataclass(frozen=True)
class ShapeOptions:
    """What the options say, looked at when it is asked for.

    Attributes:
      kept: the fields of `Limits`, `max_tokens` as a text.
      costs: what `_cost_fn` takes.
    """

    kept: dict[str, Any]
    costs: dict[str, Any]

    def limits(self) -> Limits:
        """Returns what shapes keep to and cost."""
        if self.kept["max_tokens"] is None:
            raise ValueError(
                "`--max-tokens` is missing: say what B * T may be at most, such as "
                "`--max-tokens 65536`."
            )
        budget = _budget(self.kept["max_tokens"])
        return Limits(**{**self.kept, "max_tokens": budget}, cost_fn=self.cost_fn)

    @functools.cached_property
    def cost_fn(self) -> CostFn | None:
        """What a step costs; None counts tokens."""
        return _cost_fn(**self.costs)

    def check_free(self) -> None:
        """Raises a ValueError if B or T are bounded, though they are given."""
        own = {"min_batch_size": 1, "max_batch_size": None, "max_seq_len": None}
        bound = [name for name, free in own.items() if self.kept[name] != free]
        if bound:
            option = f"--{bound[0].replace('_', '-')}"
            raise ValueError(
                f"`{option}` says nothing beside `--shapes`: leave it out."
            )

    @property
    def inputs(self) -> list[pathlib.Path]:
        """Files that are read."""
        path = self.costs["step_times"]
        return [path] if path else []

    def given(self, text: str) -> BucketPlan:
        """Returns the plan of shapes such as 32x128,16x256, costed."""
        names = ("batch_size_multiple", "seq_len_multiple", "overlong")
        fields = {name: self.kept[name] for name in names}
        if self.kept["max_tokens"] is not None:
            budget = self.limits().max_tokens
            if not isinstance(budget, int):
                raise ValueError(
                    "`--shapes` say their own B: give one `--max-tokens` beside them, "
                    "or none."
                )
            fields["max_tokens"] = budget
        plan = BucketPlan.from_shapes(shapes(text), **fields)
        return costed(plan, self.cost_fn)


def shape_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command the options, and calls it with `shape`, what they say."""

    @functools.wraps(command)
    def with_shape(**options: Any) -> Any:
        kept = {name: options.pop(name) for name in _LIMIT_NAMES}
        costs = {name: options.pop(name) for name in _COST_NAMES}
        return command(shape=ShapeOptions(kept, costs), **options)

    for option in reversed([*_LIMITS, *_COSTS]):
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
    given = {
        "--width": by_model,
        "--step-times": step_times,
        "--cost-fn": cost_fn,
    }
    ways = [name for name, value in given.items() if value]
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
    parts = [part.strip() for part in text.split(",")]
    # Not `isdigit`, which takes superscripts for digits.
    if not all(part.isdecimal() for part in parts):
        return None
    return [int(part) for part in parts]


def shapes(text: str) -> list[tuple[int, int]]:
    """Returns the shapes of a text such as 32x128,16x256.

    Raises:
      ValueError: if it is no such text.
    """
    pairs = [part.lower().split("x") for part in text.split(",")]
    numbers = [n.strip().isdecimal() for pair in pairs for n in pair]
    if not (all(numbers) and all(len(pair) == 2 for pair in pairs)):
        raise ValueError(f"`--shapes {text}`: give B x T for each, as 32x128,16x256.")
    return [(int(rows), int(length)) for rows, length in pairs]
