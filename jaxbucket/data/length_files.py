"""Reads lengths from files: numpy's by numpy, tables by pyarrow."""

from __future__ import annotations

import difflib
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from jaxbucket.base.checks import check_lengths

Unit: TypeAlias = Literal["bytes", "characters", "words"]
UNITS: tuple[str, ...] = get_args(Unit)

_NUMPY = (".npy", ".npz")
_TABLES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
_COMPRESSED = (".gz", ".bz2", ".zst", ".lz4")
# A line of text must fit into a block, which pyarrow reads as a whole.
_BLOCK_BYTES = 2**26


def read_lengths(
    path: pathlib.Path, columns: Sequence[str] = (), unit: Unit | None = None
) -> list[np.ndarray]:
    """Returns the lengths of every example in a file, which is read once.

    The suffix determines the format: `.npy` and `.npz` are read by numpy, and `.csv`,
    `.tsv`, `.jsonl` and `.parquet` by pyarrow with its own rules. Tables of text may be
    compressed, as in `.jsonl.gz`. Integers are lengths, lists and bytes are measured by
    their number of elements, and text is measured in `unit`. A tab-separated file has
    no quotes.

    Example:
      >>> import tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp(), "lines.csv")
      >>> _ = path.write_text("text\\nto be\\nor not to be\\n")
      >>> read_lengths(path, unit="words")
      [array([2, 4], dtype=int32)]

    Args:
      path: path of the file.
      columns: names of arrays, columns or fields. Required if there are several.
      unit: the unit in which text is measured.

    Returns:
      `[N]` int32 from 1 to 2**31 - 1 for each of `columns`; one array by default.

    Raises:
      ValueError: if the file is missing, empty, damaged, or not of the format of its
        suffix, if there is no such column, if pyarrow is missing, or if a row has no
        length; the message names the row, counted from 0.
    """
    suffix = path.suffix.lower()
    if suffix in _COMPRESSED:
        suffix = path.with_suffix("").suffix.lower()
    if suffix in _NUMPY:
        read = _read_numpy(path, columns)
    elif suffix in _TABLES:
        read = _read_table(path, suffix, columns, unit)
    else:
        raise ValueError(
            f"`{path}` is not one of {[*_NUMPY, *_TABLES]}. Convert it, or pass "
            "module:function, a function that returns the lengths or a source."
        )
    return [_checked(path, name, lengths) for name, lengths in read.items()]


def _checked(path: pathlib.Path, column: str, lengths: np.ndarray) -> np.ndarray:
    try:
        return check_lengths(lengths).astype(np.int32)
    except ValueError as error:
        where = f"`{path}`, column {column!r}" if column else f"`{path}`"
        raise ValueError(f"{where}: {error}") from None


def _read_numpy(path: pathlib.Path, columns: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns the chosen arrays of a file by name; that of a `.npy` file by ""."""
    try:
        loaded = np.load(path)
        if isinstance(loaded, np.ndarray):
            if columns:
                raise ValueError(f"it has one array, and not {list(columns)}")
            return {"": loaded}
        with loaded:
            names = _chosen(path, loaded.files, columns)
            return {name: loaded[name] for name in names}
    except Exception as error:
        # numpy raises many kinds of exceptions for a damaged file.
        raise ValueError(f"`{path}` cannot be read: {error}") from None


def _read_table(
    path: pathlib.Path, suffix: str, columns: Sequence[str], unit: Unit | None
) -> dict[str, np.ndarray]:
    """Returns the lengths of the rows of a table, by column."""
    try:
        import pyarrow
    except ImportError:
        raise ValueError(
            f"Reading `{path}` requires pyarrow: pip install 'jaxbucket[files]'."
        ) from None
    try:
        dataset = _dataset(path, suffix)
        names = _chosen(path, dataset.schema.names, columns)
        is_text = suffix in (".csv", ".tsv")
        if is_text and all(map(_is_number, names)):
            raise ValueError("it has numbers instead of a header with column names")
        parts: dict[str, list[np.ndarray]] = {name: [] for name in names}
        row = 0
        for batch in _batches(dataset, names):
            for name in names:
                values = batch.column(name)
                if is_text and pyarrow.types.is_binary(values.type):
                    raise ValueError(f"column {name!r} has text that is not UTF-8")
                lengths = _lengths_of(values, name, row, unit)
                parts[name].append(lengths)
            row += len(batch)
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"`{path}` cannot be read: {error}") from None
    except ValueError as error:
        raise ValueError(f"`{path}`: {error}") from None
    return {name: np.concatenate([*x, np.zeros(0, int)]) for name, x in parts.items()}


def _dataset(path: pathlib.Path, suffix: str) -> Any:
    from pyarrow import csv, dataset, json

    formats = {
        ".parquet": dataset.ParquetFileFormat,
        ".csv": lambda: dataset.CsvFileFormat(
            csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False),
            read_options=csv.ReadOptions(block_size=_BLOCK_BYTES),
        ),
        ".tsv": lambda: dataset.CsvFileFormat(
            csv.ParseOptions(
                delimiter="\t", quote_char=False, ignore_empty_lines=False
            ),
            read_options=csv.ReadOptions(block_size=_BLOCK_BYTES),
        ),
    }
    json_lines = {"read_options": json.ReadOptions(block_size=_BLOCK_BYTES)}
    make = formats.get(suffix, lambda: dataset.JsonFileFormat(**json_lines))
    return dataset.dataset(path, format=make())


def _batches(dataset: Any, names: Sequence[str]) -> Iterator[Any]:
    return dataset.to_batches(columns=list(names), batch_size=4096, use_threads=False)


def _lengths_of(values: Any, name: str, first: int, unit: Unit | None) -> np.ndarray:
    """Returns the lengths of a part of a column.

    Args:
      values: an Arrow array.
      name: the name of the column.
      first: the row of the first value.
      unit: the unit in which text is measured.
    """
    from pyarrow import compute, types

    kind = values.type
    if values.null_count:
        row = first + values.is_null().to_pylist().index(True)
        raise ValueError(f"column {name!r}, row {row} is null. Fill it, or remove it.")
    if types.is_list(kind) or types.is_large_list(kind):
        if types.is_nested(kind.value_type):
            raise ValueError(
                f"column {name!r} has nested lists, {kind}, so its number of tokens is "
                "not clear. Pass module:function, a function that counts them."
            )
        values = compute.call_function("list_value_length", [values])
    elif unit and not _is_text(kind):
        raise ValueError(
            f"column {name!r} has values of {kind}, not the text that `unit={unit!r}` "
            "measures. Leave the unit out, or store text as json lines or parquet."
        )
    elif types.is_binary(kind) or types.is_large_binary(kind):
        values = compute.call_function("binary_length", [values])
    elif _is_text(kind):
        values = _text_lengths(values, name, unit)
    elif not types.is_integer(kind):
        raise ValueError(
            f"column {name!r} has values of {kind}. Choose a column of integers, text "
            "or lists with `--column`."
        )
    lengths = values.to_numpy(zero_copy_only=False)
    if lengths.size and lengths.min() < 1:
        row = first + int(lengths.argmin())
        raise ValueError(
            f"column {name!r}, row {row} has length {lengths.min()}. Remove it."
        )
    return lengths


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    return types.is_string(kind) or types.is_large_string(kind)


def _text_lengths(values: Any, name: str, unit: Unit | None) -> Any:
    from pyarrow import compute

    if unit is None:
        first = values.to_pylist()[:1]
        raise ValueError(
            f"column {name!r} has text, not lengths: {str(first)[1:41]}. "
            f"Measure it with `--unit` {', '.join(UNITS)}."
        )
    if unit == "words":
        # Spaces around the words would be empty words.
        text = compute.call_function("utf8_trim_whitespace", [values])
        words = compute.call_function("utf8_split_whitespace", [text])
        counts = compute.call_function("list_value_length", [words])
        is_empty = compute.call_function("equal", [text, ""])
        return compute.call_function("if_else", [is_empty, 0, counts])
    functions = {"bytes": "binary_length", "characters": "utf8_length"}
    return compute.call_function(functions[unit], [values])


def _chosen(
    path: pathlib.Path, names: Sequence[str], columns: Sequence[str]
) -> Sequence[str]:
    """Returns the columns to read: the given ones, or the only one of `names`."""
    if not columns and len(names) != 1:
        raise ValueError(f"it has columns {list(names)}. Choose one with `--column`")
    if len(set(columns)) < len(columns):
        raise ValueError(f"`--column` names {list(columns)}. Name each column once.")
    for column in columns:
        if column not in names:
            near = difflib.get_close_matches(column, names, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"it has no column {column!r}, only {list(names)}.{hint}")
    return columns or names
