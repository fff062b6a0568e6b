"""Options that several commands share, and what they stand for in the library."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gzip
import importlib
import inspect
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, get_args

import click

from jaxbucket.base.bucket import Bucket
from jaxbucket.base.length_counts import LengthCounts
from jaxbucket.base.policies import GROUPS, OVERLONG
from jaxbucket.data.length_files import read_lengths, suffix_of
from jaxbucket.plan.costs import CostFn, StepTime, TokenCost, TransformerCost
from jaxbucket.plan.fitted import FittedBatchSizes
from jaxbucket.plan.flow.remainder import Remainder
from jaxbucket.plan.limits import Limits


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


POSITIVE = _Positive(min=1)
EXISTING = click.Path(exists=True, dir_okay=False, path_type=pathlib.Path)
# Lengths, which may also come from standard input.
LENGTHS = click.Path(True, dir_okay=False, allow_dash=True, path_type=pathlib.Path)
NEW = click.Path(dir_okay=False, writable=True, path_type=pathlib.Path)
_RATE = click.FloatRange(min=0, min_open=True)


def _all_of(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a decorator that adds several options to a command."""

    def add(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return add


form_option = _all_of(
    click.option("--json", "form", flag_value="json", help="Print results as JSON."),
    click.option(
        *("--quiet", "-q", "form"),
        flag_value="quiet",
        help="Print tables without explanations of their columns.",
    ),
)
plot_option = click.option("--plot", type=NEW, help="Draw a plot to this file.")
_READING = _all_of(
    click.option(
        "--column",
        "columns",
        metavar="NAME",
        multiple=True,
        help="The array, column or field to read if the file has several; meta.frames "
        "is a field in a field. Repeat it for examples with several sequences, for "
        "example --column source --column target.",
    ),
    click.option(
        "--scale",
        "scales",
        type=_RATE,
        metavar="NUMBER",
        multiple=True,
        help="Multiply lengths by this number and round up, such as 100 for seconds if "
        "there are 100 frames per second. Give it once for all columns, or for each.",
    ),
    click.option(
        "--length-fn",
        metavar="MODULE:FUNCTION",
        help="A function from a value of the column to its length.",
    ),
)
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
_LIMITS = _all_of(
    click.option(
        "--max-tokens",
        required=True,
        metavar="TOKENS",
        callback=lambda context, option, text: _budget(text),
        help="Maximum B * T, including padding, such as 65536 or 64k (in numbers, 1k "
        "is 1,024); a function of T as module:function; or a file of `jaxbucket fit "
        "-o`.",
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
        type=click.Choice(OVERLONG),
        default="error",
        help="What to do with examples longer than the last bucket; truncate keeps "
        "their first tokens, and truncate_left the last.",
    ),
)
_COSTS = _all_of(
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
        type=_RATE,
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
recipe_options = _all_of(
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
        type=_RATE,
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


def reading_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of how files are read, and passes them as `reading`.

    It is a dict of arguments of `read_lengths`.
    """

    @functools.wraps(command)
    def with_reading(columns: Any, scales: Any, length_fn: Any, **options: Any) -> Any:
        measure = load_function(length_fn) if length_fn else None
        reading = {"columns": columns, "scales": scales, "measure": measure}
        return command(reading=reading, **options)

    return _READING(with_reading)


def read_columns(path: pathlib.Path, columns: Sequence[str], **options: Any) -> Any:
    """Returns the lengths in a file, `[N]`; by name if there are several columns.

    A JSON object is a histogram, length -> number of examples.

    Args:
      path: path of the file; "-" is standard input.
      columns: the columns to read.
      options: the other options of `read_lengths`.
    """
    if str(path) == "-":
        with tempfile.TemporaryDirectory() as folder:
            data = sys.stdin.buffer.read()
            if data.startswith(b"\x1f\x8b"):
                data = gzip.decompress(data)
            path = pathlib.Path(folder, "stdin.json")
            path.write_bytes(data)
            if not data.lstrip().startswith(b"{") or not _histogram(path):
                path = path.rename(path.with_suffix(suffix_of(data)))
            return read_columns(path, columns, **options)
    if path.suffix == ".json" and (counts := _histogram(path)):
        return LengthCounts(counts, name=str(path))
    lengths = read_lengths(path, columns, **options)
    if len(columns) > 1:
        return dict(zip(columns, lengths, strict=True))
    return lengths[0]


def _histogram(path: pathlib.Path) -> dict[int, int]:
    """Returns the histogram in a JSON file; empty if it contains something else."""
    with contextlib.suppress(ValueError):
        found = json.loads(path.read_text("utf-8"))
        if isinstance(found, dict) and all(key.isdecimal() for key in found):
            return {int(length): number for length, number in found.items()}
    return {}


def load_function(name: str) -> Callable[..., Any]:
    """Loads a function named as `module:function`.

    Modules in the current folder are found, too.

    Example:
      >>> load_function("math:sqrt")(9)
      3.0
    """
    module, _, path = name.partition(":")
    # Added permanently, because later imports and workers may need the folder, too.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
        if not callable(found):
            raise TypeError(f"this is of {type(found)}, not a function")
    except Exception as error:
        raise ValueError(
            f"`{name}` cannot be loaded as `module:function`: {type(error).__name__}: "
            f"{error}. Run this in the folder of the module, or fix the module."
        ) from error
    return found


def _budget(text: str) -> Any:
    """Returns the value of `--max-tokens`, an integer or a function."""
    with contextlib.suppress(ValueError):
        return integer(text)
    if os.path.isfile(text):
        return FittedBatchSizes.load(text)
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
