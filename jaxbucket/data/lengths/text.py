"""Lengths from files of lines: text, CSV, JSON Lines, compressed by gzip or not.

A file is read line by line, and never held as a whole.
"""

from __future__ import annotations

import csv
import gzip
import json
import pathlib
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any

import numpy as np

from jaxbucket.data.lengths.values import Measure, measured, shown

# Called with the share of a file that is read, from 0 to 1.
Tell = Callable[[float], None]

# What is in memory at a time, but for the lines that are longer.
_BLOCK_BYTES = 2**18
_INTEGER_LINES = re.compile(r"(?:[0-9]+\r?\n)*[0-9]+\r?\n?")


def read_text(
    path: pathlib.Path, column: str | None, measure: Measure, tell: Tell
) -> Iterator[np.ndarray]:
    """Yields the lengths of the lines of a text, or the integers that they are.

    Raises:
      ValueError: if a line is neither or empty, or the file is no UTF-8; it names the
        line. This goes for the others, too.
    """
    if column is not None:
        raise ValueError(f"`{path}` has no columns: leave out `--column {column}`.")
    return _text_lengths(path, measure, tell)


def _text_lengths(
    path: pathlib.Path, measure: Measure, tell: Tell
) -> Iterator[np.ndarray]:
    for first, block in _blocks(path, tell):
        at_once = _integers(block) if measure == Measure() else None
        if at_once is not None:
            yield at_once
            continue
        # One by one, which also finds the line that is wrong.
        lines = _split(first, block.replace("\r\n", "\n"))
        yield from measured(f"`{path}`, line", lines, measure.of_text)


def read_csv(
    path: pathlib.Path, column: str | None, measure: Measure, tell: Tell
) -> Iterator[np.ndarray]:
    """Yields the lengths of the rows of a table whose first line names its columns."""
    rows = _csv_rows(path, tell)
    _, header = next(rows, (0, None))
    if header is None:
        raise empty(path)
    _check_header(path, header)
    where = f"`{path}`, line"
    rows = _of_width(where, rows, len(header))
    if column is None and measure.length_fn is not None:
        dicts = ((line, dict(zip(header, row, strict=True))) for line, row in rows)
        return measured(where, dicts, measure.of_value)
    index = header.index(chosen_column(path, header, column))
    cells = ((line, row[index]) for line, row in rows)
    return measured(where, cells, measure.of_text)


def read_jsonl(
    path: pathlib.Path, column: str | None, measure: Measure, tell: Tell
) -> Iterator[np.ndarray]:
    """Yields the lengths of JSON values, or of a field of each, one on each line."""
    rows = _json_rows(path, tell)
    if column is not None or measure.length_fn is None:
        rows = _fields(path, rows, column)
    return measured(f"`{path}`, line", rows, measure.of_value)


def chosen_column(path: pathlib.Path, columns: list[str], column: str | None) -> str:
    """Returns the column to read: the one named, or the only one.

    Raises:
      ValueError: if there is none of that name, or several and none is named.
    """
    if not columns:
        raise empty(path)
    if column is None and len(columns) == 1:
        return columns[0]
    if column not in columns:
        raise ValueError(f"`{path}` has {columns}: name one of them by `--column`.")
    return column


def check_columns(path: pathlib.Path, columns: list[str]) -> None:
    """Raises a ValueError if several columns have one name."""
    twice = sorted({name for name in columns if columns.count(name) > 1})
    if twice:
        raise ValueError(f"`{path}` has several columns {twice}. Rename all but one.")


def unpacked_suffix(path: pathlib.Path) -> str:
    """Returns the suffix that says what is in a file: `.csv` of `data.CSV.gz`."""
    suffix = path.suffix.lower()
    return pathlib.Path(path.stem).suffix.lower() if suffix == ".gz" else suffix


def empty(path: pathlib.Path) -> ValueError:
    """Returns the error of a file in which there is nothing."""
    return ValueError(f"`{path}` is empty: there is no example. Name another file.")


def _blocks(path: pathlib.Path, tell: Tell) -> Iterator[tuple[int, str]]:
    """Some thousand whole lines at a time, and the number of the first, from 1 on."""
    number = 1
    with path.open("rb") as raw:
        # A pipe has no size, and no place in it.
        size = path.stat().st_size
        for block in _bytes(path, raw):
            yield number, _decoded(path, number, block)
            number += block.count(b"\n")
            if size:
                tell(raw.tell() / size)


def _bytes(path: pathlib.Path, raw: IO[bytes]) -> Iterator[bytes]:
    packed = path.suffix.lower() == ".gz"
    try:
        with gzip.open(raw) if packed else raw as file:
            while block := file.read(_BLOCK_BYTES) + file.readline():
                yield block
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(
            f"`{path}` is no whole .gz file: {error}. Write it again."
        ) from None


def _decoded(path: pathlib.Path, number: int, block: bytes) -> str:
    try:
        # Some programs begin a file with a mark that it is UTF-8.
        return block.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        line = number + error.object.count(b"\n", 0, error.start)
        raise ValueError(
            f"`{path}`, line {line} is no UTF-8 text: {error.reason}. Convert the "
            "file, or name it as what it is."
        ) from None


def _split(first: int, block: str) -> Iterator[tuple[int, str]]:
    """The lines of a block, and their numbers."""
    return enumerate(block.removesuffix("\n").split("\n"), first)


def _lines(path: pathlib.Path, tell: Tell) -> Iterator[tuple[int, str]]:
    for first, block in _blocks(path, tell):
        yield from _split(first, block)


def _integers(block: str) -> np.ndarray | None:
    """The lengths that stand on the lines, if there is nothing else on any of them."""
    if not _INTEGER_LINES.fullmatch(block):
        return None
    try:
        found = np.array([int(word) for word in block.split()], np.int32)
    except (ValueError, OverflowError):
        return None
    return found if found.min() > 0 else None


def _csv_rows(path: pathlib.Path, tell: Tell) -> Iterator[tuple[int, list[str]]]:
    """The cells of every row, and the line on which it ends."""
    # A text may be long.
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    separator = "\t" if unpacked_suffix(path) == ".tsv" else ","
    # Within quotes, a line goes on in the next one.
    lines = (f"{line}\n" for _, line in _lines(path, tell))
    reader = csv.reader(lines, delimiter=separator, strict=True)
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise ValueError(
            f"`{path}`, line {reader.line_num} is no CSV: {error}. Mend the line."
        ) from None


def _check_header(path: pathlib.Path, header: list[str]) -> None:
    check_columns(path, header)
    if all(name.strip().isdecimal() for name in header):
        raise ValueError(
            f"`{path}` begins with {header}, and not with names of columns. Put them "
            "on a line of their own before it."
        )


def _of_width(
    where: str, rows: Iterator[tuple[int, list[str]]], width: int
) -> Iterator[tuple[int, list[str]]]:
    for line, row in rows:
        if len(row) != width:
            raise ValueError(
                f"{where} {line} has {len(row)} cells, and the header {width}. Mend "
                "the line."
            )
        yield line, row


def _json_rows(path: pathlib.Path, tell: Tell) -> Iterator[tuple[int, Any]]:
    for number, line in _lines(path, tell):
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"`{path}`, line {number} is no JSON: {error}. Mend the line, or "
                "delete it."
            ) from None


def _fields(
    path: pathlib.Path, rows: Iterator[tuple[int, Any]], column: str | None
) -> Iterator[tuple[int, Any]]:
    """That field of every row, which is a row itself where rows have no fields."""
    for number, row in rows:
        if number == 1 and isinstance(row, dict):
            column = chosen_column(path, list(row), column)
        if column is None:
            yield number, row
        elif isinstance(row, dict) and column in row:
            yield number, row[column]
        else:
            there = list(row) if isinstance(row, dict) else shown(row)
            raise ValueError(
                f"`{path}`, line {number} is {there}, and has no {column!r}. Mend the "
                "line, or name another field by `--column`."
            )
