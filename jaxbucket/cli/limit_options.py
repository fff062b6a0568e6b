"""The options of shapes and of what a step costs, and what they stand for."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import click

from jaxbucket.base.bucket import Bucket
from jaxbucket.base.policies import OVERLONG
from jaxbucket.cli.options import (
    EXISTING,
    POSITIVE,
    RATE,
    Each,
    accumulate_option,
    all_of,
    integer,
    load_function,
)
from jaxbucket.cli.output import note_input
from jaxbucket.plan.costs import CostFn, StepTime, TokenCost, TransformerCost
from jaxbucket.plan.limits import Limits
from jaxbucket.plan.memory_fit import FittedBatchSizes

_LIMITS = all_of(
    click.option(
        "--max-tokens",
        required=True,
        metavar="TOKENS",
        callback=lambda context, option, text: _budget(text),
        help="Maximum B * T, including padding, such as 65536 or 64k (in numbers, 1k "
        "is 1,024), or source=64k,target=32k for several sequences, as for other "
        "options of T; a function of T as module:function; or a file of `jaxbucket "
        "fit -o`.",
    ),
    click.option(
        "--batch-size-multiple",
        type=POSITIVE,
        default=1,
        help="Make every B a multiple of this.",
    ),
    click.option(
        "--seq-len-multiple",
        type=Each(POSITIVE),
        default=1,
        help="Make every T a multiple of this.",
    ),
    click.option(
        "--max-seq-len",
        type=Each(POSITIVE),
        help="T of the last bucket; by default the longest length, rounded up.",
    ),
    click.option("--min-batch-size", type=POSITIVE, default=1, help="Minimum B."),
    click.option("--max-batch-size", type=POSITIVE, help="Maximum B."),
    accumulate_option,
    click.option(
        "--sample",
        is_flag=True,
        help="The lengths are a sample of more examples, such as of a stream: make "
        "every B as large as possible, even if the sample does not fill it.",
    ),
    click.option(
        "--overlong",
        type=Each(click.Choice(OVERLONG)),
        default="error",
        help="What to do with examples longer than the last bucket; truncate keeps "
        "their first tokens, and truncate_left the last.",
    ),
)


_COSTS = all_of(
    click.option(
        "--width",
        type=POSITIVE,
        help="Use the operations of a transformer of this width as the cost.",
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
        type=RATE,
        help="Throughput of all devices together in tokens per second, or in "
        "operations per second with --width. Costs are then in seconds.",
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
)


def limit_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of shapes and costs, and passes them as `limits`.

    It is a dict of arguments of `Limits`.
    """

    @functools.wraps(command)
    def with_limits(**options: Any) -> Any:
        cost_fn = _popped_cost_fn(options)
        fields = [field.name for field in dataclasses.fields(Limits)]
        limits = {name: options.pop(name) for name in fields if name in options}
        return command(limits={**limits, "cost_fn": cost_fn}, **options)

    return _LIMITS(_COSTS(with_limits))


def step_time_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of costs, and passes them as `step_seconds`, a cost function."""

    @functools.wraps(command)
    def with_times(**options: Any) -> Any:
        return command(step_seconds=_popped_cost_fn(options), **options)

    programs = click.option(
        "--programs",
        metavar="FILE",
        type=EXISTING,
        help="What `jaxbucket precompile --json` printed. The time of a shape is its "
        "GFLOP, divided by --per-second, the operations per second of all devices.",
    )
    return _COSTS(programs(with_times))


def _popped_cost_fn(options: dict[str, Any]) -> CostFn | None:
    names = inspect.signature(_cost_fn).parameters
    return _cost_fn(**{name: options.pop(name, None) for name in names})


def _budget(text: str) -> Any:
    """Returns the value of `--max-tokens`: integers or a function."""
    with contextlib.suppress(ValueError):
        return integer(text)
    if os.path.isfile(text):
        note_input(text)
        return FittedBatchSizes.load(text)
    if "=" in text:
        return Each(POSITIVE).convert(text, None, None)
    if ":" in text:
        return load_function(text)
    raise ValueError(
        f"`max_tokens={text}`: pass an integer without commas, such as 65536 or 64k, "
        "module:function, or a file of `jaxbucket fit -o` that exists."
    )


def _cost_fn(
    width: int | None,
    depth: int | None,
    vocab_size: int | None,
    per_second: float | None,
    step_times: pathlib.Path | None,
    cost_fn: str | None,
    programs: pathlib.Path | None,
) -> CostFn | None:
    by_model = width or depth or vocab_size
    given = [by_model or per_second and not programs, step_times, cost_fn, programs]
    if sum(map(bool, given)) > 1:
        raise ValueError(
            "`width`, `step_times`, `cost_fn` and `programs` each define the cost. "
            "Pass one."
        )
    if programs:
        return _program_times(programs, per_second)
    if step_times:
        return _read_step_times(step_times)
    if cost_fn:
        return load_function(cost_fn)
    if by_model:
        if not (width and depth):
            raise ValueError(
                "`width` and `depth` are both needed for the cost of a transformer."
            )
        return TransformerCost(width, depth, vocab_size or 0, per_second)
    return TokenCost(per_second) if per_second else None


def _read_step_times(path: pathlib.Path) -> StepTime:
    try:
        times = json.loads(path.read_text("utf-8"))
        seconds = {Bucket(*json.loads(shape)): time for shape, time in times.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"`step_times={path}` is not a JSON object of shapes and seconds, such as "
            f'{{"[8, 512]": 0.21}}: {error}'
        ) from None
    return StepTime.fit(seconds)


def _program_times(path: pathlib.Path, per_second: float | None) -> CostFn:
    """Returns the seconds of the programs of `jaxbucket precompile`, by shape."""
    if per_second is None:
        raise ValueError("`programs` requires `per_second`, operations per second.")
    flops: dict[str, float] = {}
    try:
        for program in json.loads(path.read_text("utf-8"))["programs"]:
            # Of training and evaluation, training has more operations.
            label, number = program["label"], program["flops"] or 0
            flops[label] = max(number, flops.get(label, 0))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"`programs={path}` is not what `jaxbucket precompile --json` printed: "
            f"{type(error).__name__}: {error}"
        ) from None

    def seconds(batch_size: int, seq_len: Any) -> float:
        label = f"[{batch_size}, {seq_len}]"
        if not flops.get(label):
            raise ValueError(f"`programs={path}` has no operations of {label}.")
        return flops[label] / per_second

    return seconds
