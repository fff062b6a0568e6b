"""The options of how lengths are read, and the lengths that they stand for."""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import pathlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import click

from jaxbucket.base.length_counts import LengthCounts
from jaxbucket.cli.options import RATE, Input, all_of, load_function
from jaxbucket.data.length_files import read_lengths, suffix_of

# Lengths, which may also come from standard input.
LENGTHS = Input(allow_dash=True)
_READING = all_of(
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
        type=RATE,
        metavar="NUMBER",
        multiple=True,
        help="Multiply lengths by this number and round up, such as 100 for seconds if "
        "there are 100 frames per second. Give it once for each column, as 1 for text, "
        "or once for all columns of numbers.",
    ),
    click.option(
        "--length-fn",
        metavar="MODULE:FUNCTION",
        help="A function from a value of the column to its length.",
    ),
)


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
            if not _is_histogram(_json_object(path)):
                path = path.rename(path.with_suffix(suffix_of(data)))
            return read_columns(path, columns, **options)
    if path.suffix == ".json" and (found := _json_object(path)) is not None:
        if not _is_histogram(found):
            raise ValueError(
                f"`{path}` is a JSON object with the keys {list(found)[:4]}. Pass an "
                'object of how many examples have each length, such as {"128": 9}; one '
                "array of examples; or .jsonl, with an object in each line."
            )
        if columns or any(options.values()):
            raise ValueError(
                "An object of how many examples have each length is used as it is. "
                "Leave out `column`, `scale`, `length_fn` and the `unit` of text."
            )
        counts = {int(length): number for length, number in found.items()}
        return LengthCounts(counts, name=str(path))
    lengths = read_lengths(path, columns, **options)
    if len(columns) > 1:
        return dict(zip(columns, lengths, strict=True))
    return lengths[0]


def _json_object(path: pathlib.Path) -> dict[str, Any] | None:
    """Returns the object that a file consists of; None for anything else."""
    with path.open("rb") as file:
        if not file.read(64).lstrip().startswith(b"{"):
            return None
    with contextlib.suppress(ValueError):
        return json.loads(path.read_text("utf-8"))
    return None


def _is_histogram(found: dict[str, Any] | None) -> bool:
    return bool(found) and all(key.isdecimal() for key in found)
