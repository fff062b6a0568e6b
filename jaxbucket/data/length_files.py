"""Reads lengths from files: numpy's by numpy, tables by pyarrow."""

from __future__ import annotations

import contextlib
import itertools
import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from jaxbucket.base.checks import check_lengths
from jaxbucket.base.lazy import naming_the_extra
from jaxbucket.base.notes import Noting
from jaxbucket.base.sizes import lengths_matrix

Unit: TypeAlias = Literal["bytes", "characters", "words"]
UNITS: tuple[str, ...] = get_args(Unit)
# How values are measured: text in a unit, or any values by a user's function.
Measure: TypeAlias = Unit | Callable[[Any], Any] | None

_NUMPY = (".npy", ".npz")
_TABLES = (".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".parquet")
_COMPRESSED = (".gz", ".bz2", ".zst", ".lz4")
# How files of these formats begin.
_BEGINNINGS = {
    b"\x93NUMPY": ".npy",
    b"PK\x03\x04": ".npz",
    b"PAR1": ".parquet",
    b"{": ".jsonl",
    b"[": ".json",
}
# A line of text must fit into a block, which pyarrow reads as a whole.
_BLOCK_BYTES = 2**26


def read_lengths(
    path: pathlib.Path,
    columns: Sequence[str] = (),
    measure: Measure = None,
    scales: Sequence[float] = (),
) -> list[np.ndarray]:
    """Returns the lengths of every example in a file, which is read once.

    The suffix determines the format: `.npy` and `.npz` are read by numpy, and `.csv`,
    `.tsv`, `.jsonl` and `.parquet` by pyarrow with its own rules; `.json` is one array.
    Tables of text may be compressed, as in `.jsonl.gz`. Integers are lengths, lists and
    bytes are measured by their number of elements, and text is measured in a unit. A
    csv file whose header has semicolons but no commas is separated by semicolons. A
    tab-separated file has no quotes. Blank lines at the end of a file are ignored.

    Example:
      >>> import tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp(), "lines.csv")
      >>> _ = path.write_text("text\\nto be\\nor not to be\\n")
      >>> read_lengths(path, measure="words")
      [array([2, 4], dtype=int32)]

    Args:
      path: path of the file.
      columns: names of arrays, columns or fields; `a.b` is field b of field a. Required
        if there are several.
      measure: the unit in which text is measured, or a function from a value to its
        length.
      scales: one number for each column, or one for all if none is measured. Lengths
        are multiplied by it and rounded up. Required if numbers are not integers, such
        as seconds.

    Returns:
      `[N]` int32 from 1 to 2**31 - 1 for each of `columns`; one array by default. With
      several columns, an example may have length 0 in some of them.
    """
    suffix = path.suffix.lower()
    if suffix in _COMPRESSED:
        suffix = path.with_suffix("").suffix.lower()
    if suffix not in (*_NUMPY, *_TABLES):
        raise ValueError(
            f"`{path}` is not one of {[*_NUMPY, *_TABLES]}. Convert it, or pass "
            "module:function, a function that returns the lengths or a source."
        )
    with Noting(f"This is `{path}`."):
        # The error of a missing file, of which pyarrow says only the name.
        path.stat()
        if suffix in _NUMPY:
            read = _read_numpy(path, columns)
            if callable(measure):
                for name, values in read.items():
                    read[name] = _results(measure, values.tolist(), name, 0)
            elif measure:
                raise ValueError(f"`unit={measure}` is for text. Leave it out.")
        else:
            read = _read_table(path, suffix, columns, measure)
    # Text beside numbers has another scale.
    if len(scales) not in {0, len(read)} and (len(scales) > 1 or measure):
        raise ValueError(
            f"`scale={[*scales]}` for the columns {[*read]}: pass one for each, such "
            "as 1 for text, or a single one for all columns of numbers."
        )
    found = []
    each = itertools.cycle(scales or [None])
    for (name, lengths), scale in zip(read.items(), each, strict=False):
        if scale is None and lengths.dtype.kind == "f":
            example = next(filter(lambda x: x % 1, lengths), "1.0")
            raise ValueError(
                f"Column {name!r} of `{path}` has numbers that are not integers, such "
                f"as {example}. Pass what to multiply them by, such as `--scale 100` "
                "for 100 frames per second, or `--length-fn module:function`."
            )
        with Noting(f"This is column {name!r} of `{path}`."):
            lengths = lengths if scale is None else _scaled(lengths, scale)
            least = int(len(read) == 1)
            found.append(check_lengths(lengths, least=least).astype(np.int32))
    # Columns of different sizes are not those of the same examples.
    if len(found) > 1 and len({*map(len, found)}) == 1:
        with Noting(f"These are columns of `{path}`."):
            lengths_matrix(dict(zip(read, found, strict=True)), list(read))
    return found


def suffix_of(beginning: bytes) -> str:
    """Returns the suffix for a file without a name, by its first bytes."""
    for text, suffix in _BEGINNINGS.items():
        if beginning.startswith(text) or beginning.lstrip().startswith(text):
            return suffix
    return ".tsv" if b"\t" in beginning.partition(b"\n")[0] else ".csv"


def _scaled(values: np.ndarray, scale: float) -> np.ndarray:
    """Returns numbers times `scale`, rounded up; -1 for NaN and negative numbers."""
    if values.dtype.kind not in "iuf":
        return values
    # Rounding errors do not count: 1.1 * 100 is a little more than 110.
    error = 2 * np.finfo(np.result_type(values.dtype, np.float32)).eps
    exact = np.nan_to_num(values.astype(np.float64) * scale, nan=-1).clip(-1, 2**32)
    nearest = np.rint(exact)
    scaled = np.where(
        np.abs(exact - nearest) <= error * np.abs(exact), nearest, np.ceil(exact)
    )
    return np.where(exact < 0, -1, scaled).astype(np.int64)


def _read_numpy(path: pathlib.Path, columns: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns the chosen arrays of a file by name; that of a `.npy` file by ""."""
    loaded = np.load(path)
    if isinstance(loaded, np.ndarray):
        return {name: loaded for name in _chosen([""], columns)}
    with loaded:
        return {name: loaded[name] for name in _chosen(loaded.files, columns)}


def _read_table(
    path: pathlib.Path, suffix: str, columns: Sequence[str], measure: Measure
) -> dict[str, np.ndarray]:
    """Returns the lengths of the rows of a table, by column."""
    with naming_the_extra():
        dataset = _dataset(path, suffix)
        from pyarrow import types
    names = _chosen([*_names(dataset.schema)], columns)
    is_plain = suffix in (".csv", ".tsv")
    if is_plain and all(map(_is_number, names)):
        raise ValueError(
            f"The columns have the numbers {names} as names. Add a header to the file."
        )
    kinds = {field.name: str(field.type) for field in dataset.schema}
    if is_plain and "binary" in (kinds[name] for name in names):
        raise ValueError(
            f"The columns {kinds} have text that is not UTF-8. Convert the file."
        )
    parts: dict[str, list[np.ndarray]] = {name: [] for name in names}
    row = 0
    for batch in _batches(dataset, names, is_plain):
        for name in names:
            values = batch.column(name)
            is_number = types.is_integer(values.type) or types.is_floating(values.type)
            # Of several columns, the unit is that of those with text.
            is_length = is_number and len(names) > 1 and not callable(measure)
            use = None if is_length else measure
            parts[name].append(_lengths_of(values, name, row, use))
        row += len(batch)
    empty = [np.zeros(0, int)]
    return {name: np.concatenate(part or empty) for name, part in parts.items()}


def _names(fields: Any, parent: str = "") -> Iterator[str]:
    """Yields the names of fields and, with dots, of the fields in them."""
    from pyarrow import types

    for field in fields:
        yield parent + field.name
        if types.is_struct(field.type):
            yield from _names(field.type, f"{parent}{field.name}.")


def _batches(dataset: Any, names: Sequence[str], is_plain: bool) -> Iterator[Any]:
    """Yields parts of a table; of csv and tsv without the blank lines at the end."""
    from pyarrow import compute

    options: dict[str, Any] = {"batch_size": 4096, "use_threads": False}
    if not is_plain:
        # The name of a whole column may have dots, too.
        whole = dataset.schema.names
        paths = {x: (x,) if x in whole else x.split(".") for x in names}
        fields = {name: compute.field(*path) for name, path in paths.items()}
        yield from dataset.to_batches(columns=fields, **options)
        return
    blank: list[Any] = []
    for batch in dataset.to_batches(**options):
        # Only a row that is null in all columns is a blank line.
        is_null = [x.is_null().to_numpy(zero_copy_only=False) for x in batch.columns]
        filled = np.flatnonzero(~np.logical_and.reduce(is_null))
        if len(filled):
            number = int(filled[-1]) + 1
            yield from [*blank, batch.slice(0, number)]
            batch, blank = batch.slice(number), []
        blank.append(batch)


def _dataset(path: pathlib.Path, suffix: str) -> Any:
    import pyarrow
    from pyarrow import csv, dataset
    from pyarrow import json as json_lines

    if suffix == ".parquet":
        return dataset.dataset(path, format="parquet")
    if suffix == ".json":
        return dataset.dataset(_json_array(path))
    if suffix not in (".csv", ".tsv"):
        lines = json_lines.ReadOptions(block_size=_BLOCK_BYTES)
        return dataset.dataset(path, format=dataset.JsonFileFormat(read_options=lines))
    rules: dict[str, Any] = {"newlines_in_values": True}
    if suffix == ".tsv":
        rules = {"delimiter": "\t", "quote_char": False}
    else:
        with pyarrow.input_stream(str(path)) as file:
            header = file.read(2**16).partition(b"\n")[0]
        if b";" in header and b"," not in header:
            rules["delimiter"] = ";"
    # Only a blank value is null, and neither "NA" nor a quoted text.
    nulls = {"null_values": [""], "strings_can_be_null": True}
    table = dataset.CsvFileFormat(
        csv.ParseOptions(ignore_empty_lines=False, **rules),
        convert_options=csv.ConvertOptions(quoted_strings_can_be_null=False, **nulls),
        read_options=csv.ReadOptions(block_size=_BLOCK_BYTES),
    )
    return dataset.dataset(path, format=table)


def _json_array(path: pathlib.Path) -> Any:
    """Returns the table of an array of JSON objects, or of an array of values."""
    import pyarrow

    with pyarrow.input_stream(str(path)) as file:
        text = file.read()
    rows = None
    with contextlib.suppress(json.JSONDecodeError):
        rows = json.loads(text)
    if not isinstance(rows, list):
        raise ValueError(
            f"`{path}` is not one JSON array of examples. If each of its lines is a "
            "JSON object, name it .jsonl."
        )
    values = pyarrow.array(rows)
    if pyarrow.types.is_struct(values.type):
        return pyarrow.Table.from_struct_array(values)
    return pyarrow.table({"": values})


def _lengths_of(values: Any, name: str, first: int, measure: Measure) -> np.ndarray:
    """Returns the lengths of a part of a column, an Arrow array from row `first` on."""
    from pyarrow import compute, types

    kind = values.type
    if values.null_count:
        row = first + values.is_null().to_pylist().index(True)
        raise ValueError(f"Column {name!r}, row {row} is null. Fill it, or remove it.")
    if callable(measure):
        return _results(measure, values.to_pylist(), name, first)
    is_list = types.is_list(kind) or types.is_large_list(kind)
    is_text = types.is_string(kind) or types.is_large_string(kind)
    is_nested = types.is_struct(kind) or is_list and types.is_nested(kind.value_type)
    has_wrong_unit = not measure if is_text else bool(measure) and not is_list
    if is_nested or has_wrong_unit:
        raise ValueError(
            f"Column {name!r} has values of {kind}. Text is measured by "
            f"`jaxbucket measure --unit`, in {' or '.join(UNITS)}; numbers and lists "
            "need no unit; and anything else a function, `--length-fn module:function`."
        )
    if is_list:
        values = compute.call_function("list_value_length", [values])
    elif is_text:
        values = _text_lengths(values, measure)
    elif types.is_binary(kind) or types.is_large_binary(kind):
        values = compute.call_function("binary_length", [values])
    return values.to_numpy(zero_copy_only=False)


def _results(
    length_fn: Callable[[Any], Any], values: list[Any], name: str, first: int
) -> np.ndarray:
    """Returns the results of a user's function for a part of a column."""
    lengths = []
    for row, value in enumerate(values, first):
        with Noting(f"This is `length_fn` of column {name!r}, row {row}."):
            lengths.append(length_fn(value))
    return np.asarray(lengths)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _text_lengths(values: Any, unit: Unit | None) -> Any:
    from pyarrow import compute

    if unit == "words":
        # Spaces around the words would be empty words.
        text = compute.call_function("utf8_trim_whitespace", [values])
        words = compute.call_function("utf8_split_whitespace", [text])
        counts = compute.call_function("list_value_length", [words])
        is_empty = compute.call_function("equal", [text, ""])
        return compute.call_function("if_else", [is_empty, 0, counts])
    function = "binary_length" if unit == "bytes" else "utf8_length"
    return compute.call_function(function, [values])


def _chosen(names: Sequence[str], columns: Sequence[str]) -> Sequence[str]:
    """Returns the columns to read: the given ones, or the only one of `names`."""
    chosen = columns or names
    is_clear = bool(columns) or len(names) == 1
    if not is_clear or len({*chosen} & {*names}) < len(chosen):
        raise ValueError(
            f"`--column` names {list(columns)}, and the file has {list(names)}. Choose "
            "one or several of these, each of them once: `--column NAME`."
        )
    return chosen
