"""Lengths read from files of every format, and the errors of invalid files."""

import csv
import gzip
import json
import os
import pathlib
import re
import sys
import threading
import tracemalloc
from collections.abc import Callable

import numpy as np
import pyarrow
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from pyarrow import parquet

from jaxbucket.data import TokenFile, write_token_file
from jaxbucket.data.lengths.files import read_lengths
from jaxbucket.data.lengths.functions import load_function, measure_function
from jaxbucket.data.lengths.summary import summarize_lengths
from jaxbucket.data.lengths.values import Measure


def lengths_in(path, column=None, measure=None) -> np.ndarray:
    """The lengths in a file, in one of its columns."""
    (lengths,) = read_lengths(path, [column] if column else [], measure)
    return lengths


def lengths_by(function, column=None, measure=None) -> np.ndarray:
    """The lengths of the examples that a function returns, of one of their features."""
    (lengths,) = measure_function(function, [column] if column else [], measure)
    return lengths


ALPHABET = np.array(list("ab é漢😀\t,\"'\u2028"))


def texts_of(seed: int) -> list[str]:
    """Texts with special characters of all formats, except for newlines."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 40, 300)
    return ["x" + "".join(rng.choice(ALPHABET, size)) for size in sizes]


def lengths_of(seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 2 ** rng.integers(1, 31, 5000)).tolist()
    return [*lengths, 1, 2**31 - 1]


def write_csv(path: pathlib.Path, values: list, separator: str = ",") -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=separator)
        writer.writerow(["id", "x"])
        writer.writerows(enumerate(values))


def write_text(path: pathlib.Path, values: list) -> None:
    path.write_bytes("".join(f"{value}\n" for value in values).encode())


def write_jsonl(path: pathlib.Path, values: list) -> None:
    write_text(path, [json.dumps({"id": "", "x": value}) for value in values])


def write_parquet(path: pathlib.Path, values: list) -> None:
    table = pyarrow.table({"id": range(len(values)), "x": values})
    parquet.write_table(table, path, row_group_size=1000)


def write_records(path: pathlib.Path, values: list[bytes]) -> None:
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for value in values:
        writer.write(value)
    writer.close()


def gzipped(write: Callable[..., None]) -> Callable[..., None]:
    def write_gzipped(path: pathlib.Path, values: list) -> None:
        plain = path.with_suffix("")
        write(plain, values)
        path.write_bytes(gzip.compress(plain.read_bytes()))

    return write_gzipped


WRITERS = {
    "x.txt": (write_text, None),
    "x": (write_text, None),
    "x.txt.gz": (gzipped(write_text), None),
    "x.csv": (write_csv, "x"),
    "X.CSV": (write_csv, "x"),
    "x.csv.gz": (gzipped(write_csv), "x"),
    "x.tsv": (lambda path, values: write_csv(path, values, "\t"), "x"),
    "x.jsonl": (write_jsonl, "x"),
    "x.ndjson": (write_jsonl, "x"),
    "x.jsonl.gz": (gzipped(write_jsonl), "x"),
    "x.parquet": (write_parquet, "x"),
}
UNITS = {
    "bytes": lambda text: len(text.encode()),
    "characters": len,
    "words": lambda text: len(text.split()),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", WRITERS)
def test_lengths_are_read_from_every_format(tmp_path, name, seed):
    write, column = WRITERS[name]
    write(tmp_path / name, lengths_of(seed))
    assert lengths_in(tmp_path / name, column).tolist() == lengths_of(seed)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("name", WRITERS)
def test_texts_are_measured_in_every_format_and_unit(tmp_path, name, unit):
    write, column = WRITERS[name]
    for seed in range(3):
        texts = texts_of(seed)
        write(tmp_path / name, texts)
        result = lengths_in(tmp_path / name, column, Measure(unit))
        assert result.tolist() == [UNITS[unit](text) for text in texts]


@pytest.mark.parametrize("name", WRITERS)
def test_a_length_function_receives_the_column(tmp_path, name):
    write, column = WRITERS[name]
    write(tmp_path / name, texts_of(0))
    received = []
    measure = Measure(
        length_fn=lambda text: received.append(text) or 1 + text.count("a")
    )
    result = lengths_in(tmp_path / name, column, measure)
    assert received == texts_of(0)
    assert result.tolist() == [1 + text.count("a") for text in texts_of(0)]


@pytest.mark.parametrize("name", [name for name in WRITERS if WRITERS[name][1]])
def test_without_a_column_a_length_function_receives_the_row(tmp_path, name):
    WRITERS[name][0](tmp_path / name, texts_of(0))
    result = lengths_in(
        tmp_path / name, measure=Measure(length_fn=lambda row: len(row["x"]))
    )
    assert result.tolist() == [len(text) for text in texts_of(0)]


def test_lengths_are_read_from_numpy_arrays(tmp_path):
    for dtype in (np.int8, np.uint16, np.int32, np.int64, np.uint64):
        lengths = np.arange(1, 100).astype(dtype)
        np.save(tmp_path / "x.npy", lengths)
        np.savez_compressed(tmp_path / "x.npz", x=lengths, other=lengths[:3])
        for name, column in (("x.npy", None), ("x.npz", "x")):
            result = lengths_in(tmp_path / name, column)
            assert result.tolist() == lengths.tolist()


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
def test_the_length_of_a_list_is_its_number_of_items(tmp_path, name):
    lists = [list(range(n)) for n in np.random.default_rng(0).integers(1, 50, 200)]
    WRITERS[name][0](tmp_path / name, lists)
    result = lengths_in(tmp_path / name, "x")
    assert result.tolist() == [len(each) for each in lists]


NESTED = {
    "a batch of one": [[7, 7, 7]],
    "sentences": [[7, 7], [7]],
    "chat messages": [{"role": "user", "content": "a"}] * 2,
    "first null": [None, [1, 2]],
    "pairs of texts": [["user", "a"], ["assistant", "b"]],
}


@pytest.mark.parametrize("case", NESTED)
@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet", "function"])
def test_nested_lists_are_refused_without_a_function(tmp_path, name, case, module):
    values = [NESTED[case]] * 3
    path = tmp_path / name
    if name == "function":
        examples = [{"x": value} for value in values]
        pathlib.Path(f"{module}.py").write_text(f"def values(): return {examples}")

        def measured(measure):
            return lengths_by(f"{module}:values", "x", measure)

    else:
        WRITERS[name][0](path, values)

        def measured(measure):
            return lengths_in(path, "x", measure)

    for unit in (None, "bytes"):
        with pytest.raises(
            ValueError, match="is nested, .* `--length-fn` with a function"
        ):
            measured(Measure(unit))
    measure = Measure(length_fn=load_function("builtins:len"))
    assert measured(measure).tolist() == [len(NESTED[case])] * 3


def test_later_entries_of_a_list_may_be_nested():
    entries = np.empty(2, object)
    entries[:] = [np.arange(3), np.arange(5)]
    for value in ([1, [2, 3]], (None, {"a": 1}), entries):
        with pytest.raises(ValueError, match="is nested"):
            Measure().of_value(value)


@pytest.mark.parametrize("column", ["x", None])
@pytest.mark.parametrize("kind", ["list", "iter"])
def test_arrays_of_one_frame_are_batches_only_if_all_are(module, column, kind):
    body = "import numpy as np\ndef values(n=7): return "
    pathlib.Path(f"{module}.py").write_text(
        f'{body}{kind}([{{"x": np.zeros((size, 80))}} for size in (1, n)])\n'
        "def batches(): return values(1)"
    )
    assert lengths_by(f"{module}:values", column, Measure()).tolist() == [1, 7]
    with pytest.raises(ValueError, match="All lengths are 1, because feature 'x'"):
        lengths_by(f"{module}:batches", column, Measure())


ARROW_TYPES = {
    "large_string": (pyarrow.large_string(), texts_of(0)),
    "dictionary": (pyarrow.dictionary(pyarrow.int32(), pyarrow.string()), texts_of(0)),
    "binary": (pyarrow.binary(), [text.encode() for text in texts_of(0)]),
    "large_list": (pyarrow.large_list(pyarrow.int8()), [[1] * n for n in (1, 5, 9)]),
    "fixed_list": (pyarrow.list_(pyarrow.int8(), 2), [[1, 2], [3, 4]]),
    "uint8": (pyarrow.uint8(), [1, 255]),
    "uint64": (pyarrow.uint64(), [1, 2**31 - 1]),
}


@pytest.mark.parametrize("kind", ARROW_TYPES)
def test_columns_of_every_arrow_type_are_measured(tmp_path, kind):
    arrow, values = ARROW_TYPES[kind]
    array = pyarrow.array(values, pyarrow.string() if kind == "dictionary" else arrow)
    parquet.write_table(pyarrow.table({"x": array.cast(arrow)}), tmp_path / "x.parquet")
    result = lengths_in(tmp_path / "x.parquet", measure=Measure("bytes"))
    expected = [
        value
        if isinstance(value, int)
        else len(value.encode())
        if isinstance(value, str)
        else len(value)
        for value in values
    ]
    assert result.tolist() == expected


@pytest.mark.parametrize("name", ["x.array_record", "x.arrayrecord"])
def test_records_are_measured_in_bytes_by_default(tmp_path, name, monkeypatch):
    monkeypatch.setattr("jaxbucket.data.lengths.records._ROWS", 64)
    records = [text.encode() for text in texts_of(0)]
    write_records(tmp_path / name, records)
    result = lengths_in(tmp_path / name)
    assert result.tolist() == [len(record) for record in records]
    result = lengths_in(tmp_path / name, measure=Measure("characters"))
    assert result.tolist() == [len(text) for text in texts_of(0)]
    result = lengths_in(tmp_path / name, measure=Measure(length_fn=lambda b: b[0]))
    assert result.tolist() == [ord("x")] * len(records)


@pytest.mark.parametrize(
    ("name", "content", "lengths"),
    [
        ("x.txt", "\ufeff3\r\n+4\r\n 5", [3, 4, 5]),
        ("x.txt", "007\n8", [7, 8]),
        ("x.csv", "\ufeffx\r\n3\r\n4\r\n", [3, 4]),
        ("x.csv", 'x\n"3"\n', [3]),
        ("x.jsonl", '3\n"ab"\n[1, 2, 3, 4]\n', [3, 2, 4]),
        ("x.jsonl", '{"x": 3}\n{"y": 1, "x": 5}\n', [3, 5]),
        ("x.jsonl", '{"x": 3}\n{"x": 5}\n\n', [3, 5]),
        ("x.ndjson", "3\r\n5\r\n \t\r\n\n", [3, 5]),
        ("x.csv", "x\n3\n5\n\n", [3, 5]),
        ("x.csv", "x\r\n3\r\n5\r\n\r\n\r\n", [3, 5]),
        ("x.tsv", "x\n3\n5\n\n\n", [3, 5]),
    ],
)
def test_equivalent_files_have_the_same_lengths(tmp_path, name, content, lengths):
    (tmp_path / name).write_text(content, newline="", encoding="utf-8")
    measure = Measure("bytes") if name == "x.jsonl" else None
    assert lengths_in(tmp_path / name, measure=measure).tolist() == lengths


def test_line_endings_are_not_measured(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"a\r\nbc\r\ndef\n")
    result = lengths_in(tmp_path / "x.txt", measure=Measure("bytes"))
    assert result.tolist() == [1, 2, 3]


def test_a_quoted_csv_cell_may_contain_newlines(tmp_path):
    long = "y" * 200_000
    write_csv(tmp_path / "x.csv", ["a\nb", long])
    result = lengths_in(tmp_path / "x.csv", "x", Measure("characters"))
    assert result.tolist() == [3, len(long)]


OPEN, CLOSED = '"Come in', 'he said."'
SPEECHES = {
    "twenty rows apart": {100: OPEN, 120: CLOSED},
    "in two rows": {7: OPEN, 8: CLOSED},
    "never closed": {500: OPEN},
    "text after a quote": {0: '"では"と彼は言った。', 999: 'a "b" ""'},
    "in some rows": {3: '"a"', 7: '"a" b'},
    "in the header": {},
}


@pytest.mark.parametrize("case", SPEECHES)
@pytest.mark.parametrize("name", ["x.tsv", "x.tsv.gz"])
def test_quotes_of_a_tab_separated_file_are_text(tmp_path, name, case):
    texts = [SPEECHES[case].get(i, f"sentence {i}") for i in range(1000)]
    header = '"id"\ttext\tms' if case == "in the header" else "id\ttext\tms"
    rows = [f"{i}\t{text}\t{1000 + i}" for i, text in enumerate(texts)]
    content = "\n".join([header, *rows, "", ""]).encode()
    compressed = gzip.compress(content) if name.endswith(".gz") else content
    (tmp_path / name).write_bytes(compressed)
    assert lengths_in(tmp_path / name, "ms").tolist() == list(range(1000, 2000))
    sizes = lengths_in(tmp_path / name, "text", Measure("characters"))
    assert sizes.tolist() == [len(text) for text in texts]


@pytest.mark.parametrize(
    ("content", "sizes"),
    [
        ('"y"\t"x"\n"1"\t"hello"\n"2"\t"abc"\n', [5, 3]),
        ('y\tx\n1\t"say ""hi"""\n2\tabc\n', [8, 3]),
        ('x\n"line1\nline2"\nabc\n', [11, 3]),
        ('y\tx\r\n1\t"a""\r\nb"\r\n', [5]),
        ('y\tx\n1\t"abc\ndef"\t2\n', [4, 1]),
        ('y\tx\n1\t"abc"d\n2\t"e"\n', [6, 3]),
    ],
)
def test_quotes_that_enclose_cells_are_not_text(tmp_path, content, sizes):
    (tmp_path / "x.tsv").write_bytes(content.encode())
    found = lengths_in(tmp_path / "x.tsv", "x", Measure("characters"))
    assert found.tolist() == sizes


@pytest.mark.parametrize("text", ["a\nb", "a\n\nb\n", "a\tb", '"\ta"'])
def test_quotes_around_tabs_or_newlines_are_read(tmp_path, text):
    write_csv(tmp_path / "x.tsv", [text, 'say "x"', "c"], "\t")
    sizes = lengths_in(tmp_path / "x.tsv", "x", Measure("characters"))
    assert sizes.tolist() == [len(text), 7, 1]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.tsv", '"a\t1\nb"\t2\n"\t"\t3\n', "line 4 is not CSV: it has 3 cells"),
        ("x.tsv", '3\t"a\n4\t5\nb"\n', "line 4 is not CSV: it has 1 cells"),
        ("x.tsv", '3\t"a\nb"\n"c\t4\nd"\t5\n', "line 3 is not CSV: it has 1 cells"),
        ("x.tsv", '"a"b\t1\nc\n', "line 3 is not CSV: it has 1 cells"),
        ("x.tsv", "3\t4\n\n3\t4\n", "line 3 is not CSV: it has 0 cells"),
        ("x.tsv", '3\t4\n"5', "line 3 is not CSV: it has 1 cells"),
        ("x.csv", "3,4\n \n", "line 3 is not CSV: it has 1 cells"),
    ],
)
def test_rows_that_may_be_lost_are_refused(tmp_path, name, content, message):
    header = "x\ty\n" if name == "x.tsv" else "x,y\n"
    (tmp_path / name).write_text(header + content)
    with pytest.raises(ValueError, match=message):
        lengths_in(tmp_path / name, "x", Measure("characters"))


def test_a_last_cell_of_spaces_is_a_row(tmp_path):
    for name, content in (("x.csv", "x\na\n \n\n"), ("x.tsv", "x\ty\na\tb\n \t \n")):
        (tmp_path / name).write_text(content)
        sizes = lengths_in(tmp_path / name, "x", Measure("characters"))
        assert sizes.tolist() == [1, 1]


def test_a_tab_separated_pipe_is_read_once(tmp_path):
    os.mkfifo(tmp_path / "x.tsv")
    content = 'x\ty\n"a\t3\nb"\t5\n'
    writer = threading.Thread(target=(tmp_path / "x.tsv").write_text, args=[content])
    writer.start()
    assert lengths_in(tmp_path / "x.tsv", "y").tolist() == [3, 5]
    writer.join()


def test_line_numbers_are_right_after_the_first_chunk(tmp_path):
    lines = [str(n) for n in range(1, 6000)]
    write_text(tmp_path / "x.txt", lines)
    assert lengths_in(tmp_path / "x.txt").tolist() == list(range(1, 6000))
    for wrong, message in (
        ("0", "line 5701: the length"),
        ("\udcff", "line 5701 is n"),
    ):
        lines[5700] = wrong
        text = "\n".join(lines).encode(errors="surrogateescape")
        (tmp_path / "x.txt").write_bytes(text)
        with pytest.raises(ValueError, match=message):
            lengths_in(tmp_path / "x.txt")


@pytest.mark.parametrize("name", ["x.txt", "x.txt.gz", "x.csv", "x.jsonl"])
def test_a_file_is_never_in_memory_as_a_whole(tmp_path, name):
    write, column = WRITERS[name]
    write(tmp_path / name, ["word " * 2000] * 2000)
    tracemalloc.start()
    try:
        lengths_in(tmp_path / name, column, Measure("characters"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4e6  # of 20e6


def test_a_table_is_never_in_memory_as_a_whole(tmp_path):
    table = pyarrow.table({"x": [str(n) + "word " * 400 for n in range(25_000)]})
    parquet.write_table(table, tmp_path / "x.parquet", compression="none")
    size = table.nbytes
    del table
    before = pyarrow.total_allocated_bytes()
    highest = 0

    def look(text: str) -> int:
        nonlocal highest
        highest = max(highest, pyarrow.total_allocated_bytes() - before)
        return len(text)

    lengths_in(tmp_path / "x.parquet", measure=Measure(length_fn=look))
    assert highest < size / 3


PARQUET = {
    "null": [1, None],
    "nan": [1.0, float("nan")],
    "float": [1.0, 2.5],
    "negative": [1, -2],
    "huge": [1, 2**31],
    "text": ["", "a"],
    "struct": [{"a": 1}],
    "bool": [True],
    "empty list": [[1], []],
}
LATE = 6000  # After the first batch.


@pytest.mark.parametrize(
    ("values", "unit", "message"),
    [
        ("null", None, "'x' row 1: None is not an integer, a string or a list"),
        ("nan", None, "'x' row 0: 1.0 is not an integer, a"),
        ("float", None, "'x' row 0: 1.0 is not an integer, a"),
        (
            "negative",
            None,
            "'x' row 1: the length is -2, but it must be from 1 to 2147483647",
        ),
        ("huge", None, "'x' row 1: the length is 2147483648, but it must be from 1"),
        (
            "text",
            None,
            "'x' row 0: '' is text, not a length. Measure it with `jaxbucket measure",
        ),
        ("text", "bytes", "'x' row 0: the length is 0"),
        ("text", "characters", "'x' row 0: the length is 0"),
        ("text", "words", "'x' row 0: the length is 0"),
        ("struct", None, "'x' row 0: {'a': 1} is not an integer"),
        ("bool", None, "'x' row 0: True is not an integer"),
        ("empty list", None, "'x' row 1: the length is 0"),
    ],
)
def test_rows_of_parquet_without_a_length_are_named(tmp_path, values, unit, message):
    write_parquet(tmp_path / "x.parquet", PARQUET[values])
    with pytest.raises(ValueError, match=re.escape(message)):
        lengths_in(tmp_path / "x.parquet", "x", Measure(unit))


def test_parquet_row_numbers_are_right_after_the_first_batch(tmp_path):
    write_parquet(tmp_path / "x.parquet", [1] * LATE + [0])
    with pytest.raises(ValueError, match=f"'x' row {LATE}: the length is 0"):
        lengths_in(tmp_path / "x.parquet", "x")


@pytest.mark.parametrize(
    ("name", "content", "unit", "message"),
    [
        ("x.txt", b"", None, "`x.txt` is empty. Pass a file with at"),
        ("x.csv", b"", None, "`x.csv` is empty"),
        ("x.csv", b"x\n", None, "`x.csv` is empty"),
        ("x.jsonl", b"", None, "`x.jsonl` is empty"),
        ("x.npy", b"", None, "`x.npy` is empty"),
        ("x.txt.gz", b"", None, "`x.txt.gz` is empty"),
        ("x.txt", b"3\nthree\n", None, "`x.txt`, line 2: 'three' is not an integer."),
        ("x.txt", b"3\n4.5\n", None, "line 2: '4.5' is not an integer. Convert"),
        ("x.txt", b"3 4\n", None, "line 1: '3 4' is not an integer"),
        ("x.txt", b"1_000\n", None, "line 1: '1_000' is not an integer"),
        ("x.txt", "٣\n".encode(), None, "line 1: '٣' is not an integer"),
        ("x.txt", b"3\n\n4\n", None, "line 2: the length is missing. Fill it in"),
        ("x.txt", b"3\nnan\n", None, "line 2: 'nan' is not a length. Fill in a"),
        ("x.txt", b"406.0\n", None, "line 1: '406.0' has a decimal point or an exp"),
        (
            "x.csv",
            b"x\n4.06\n",
            None,
            "line 2: '4.06' is not an integer. Choose a different column with "
            "`--column`, or convert the numbers to frames, tokens or bytes first.",
        ),
        (
            "x.csv",
            b"x\nu0\n",
            None,
            "line 2: 'u0' is not an integer. Choose a different column with "
            "`--column`, or measure texts with `jaxbucket measure --unit`",
        ),
        ("x.csv", b"x,y\n3,\n", None, "`x.csv` has columns ['x', 'y']"),
        ("x.csv", b'x\n""\n', None, "line 2: the length is missing. Fill it in, or"),
        (
            "x.txt",
            b"3\n0\n",
            None,
            "line 2: the length is 0, but it must be from 1 to 21474836",
        ),
        ("x.txt", b"-3\n", None, "line 1: the length is -3"),
        ("x.txt", b"3\n2147483648\n", None, "line 2: the length is 2147483648"),
        ("x.txt", b"9" * 9999, None, "line 1: the length is 2147483648"),
        (
            "x.txt",
            b"a\n\nb\n",
            "bytes",
            "line 2: the length is 0, but it must be from 1",
        ),
        ("x.txt", b"a\n \n", "words", "line 2: the length is 0"),
        ("x.txt", b"a\n\xff\n", "bytes", "line 2 is not UTF-8 text: invalid start"),
        ("x.txt.gz", b"plain", None, "`x.txt.gz` is not a complete .gz file: Not"),
        (
            "x.csv",
            b"x\n3\n4,5\n",
            None,
            "line 3 is not CSV: it has 2 cells, but the he",
        ),
        ("x.csv", b"x\n3\n\n4", None, "line 3 is not CSV: it has 0 cells, but the he"),
        ("x.csv", b'x\n"3\n4\n', None, "is not CSV: unexpected end of data. Fix"),
        (
            "x.csv",
            b"x,x\n3,4\n",
            None,
            "`x.csv` has several columns named ['x']. Rename",
        ),
        ("x.csv", b"3\n4\n", None, "starts with ['3'] instead of column names"),
        ("x.csv", b"\nn\n1\n", None, "starts with [] instead of column names"),
        ("x.csv", b"x\n3\n\xff\n", None, "line 3 is not UTF-8 text"),
        (
            "x.csv",
            b"x\n3\nNone\n",
            None,
            "line 3: 'None' is not a length. Fill in a",
        ),
        ("x.csv", b"x,y\n3,4\n", None, "`x.csv` has columns ['x', 'y']. Choose one w"),
        ("x.jsonl", b'{"x": 3}\n{"x": \n', None, "line 2 is not JSON: Expecting value"),
        ("x.jsonl", b"3\n\n4\n", None, "line 2 is not JSON"),
        ("x.jsonl", b"[" * 10**6, None, "line 1 is not JSON"),
        (
            "x.jsonl",
            b'{"x": 3}\n{"y": 3}\n',
            None,
            "line 2 is an object with fields ['y'], which has",
        ),
        ("x.jsonl", b'{"x": 3}\n4\n', None, "line 2 is 4, which has no field 'x'"),
        (
            "x.jsonl",
            b'{"x": 3, "y": 4}',
            None,
            "has columns ['x', 'y']. Choose one with",
        ),
        ("x.jsonl", b"3\nnull\n", None, "line 2: None is not an integer, a"),
        ("x.jsonl", b"3\nNaN\n", None, "line 2: nan is not an integer, a string"),
        ("x.jsonl", b"3.0\n", None, "line 1: 3.0 is not an integer, a string"),
        ("x.jsonl", b"true\n", None, "line 1: True is not an integer, a string"),
        (
            "x.jsonl",
            b'"abc"\n',
            None,
            "line 1: 'abc' is text, not a length. Measure it with `jaxbuck",
        ),
        ("x.jsonl", b'"\\ud800"\n', "bytes", "line 1: 'utf-8' codec can't encode"),
        ("x.npy", b"hello", None, "`x.npy` is not a complete numpy file"),
        ("x.npz", b"hello", None, "`x.npz` is not a complete numpy file"),
        ("x.parquet", b"", None, "`x.parquet` is not a complete .parquet file"),
        ("x.parquet", b"hello" * 99, None, "`x.parquet` is not a complete .parquet"),
        (
            "x.array_record",
            b"",
            None,
            "`x.array_record` is not a complete .array_record file",
        ),
        ("x.array_record", b"x" * 2**17, None, "is not a complete .array_record file"),
        ("x.npy", b"x", "bytes", "contains lengths, not examples. Remove `--unit`"),
        *(
            (f"x.{kind}.gz", b"x", None, "is gzipped, which only files of lines may")
            for kind in ("npy", "npz", "parquet", "array_record")
        ),
    ],
)
def test_files_without_lengths_are_refused(
    tmp_path, monkeypatch, name, content, unit, message
):
    monkeypatch.chdir(tmp_path)
    pathlib.Path(name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        lengths_in(pathlib.Path(name), measure=Measure(unit))
    assert f"`{name}`" in str(caught.value) and "\n" not in str(caught.value)


def test_parquet_columns_with_the_same_name_are_refused(tmp_path):
    table = pyarrow.table([pyarrow.array([1]), pyarrow.array([2])], names=["x", "x"])
    parquet.write_table(table, tmp_path / "x.parquet")
    for column, measure in (("x", None), (None, Measure(length_fn=len))):
        with pytest.raises(ValueError, match=r"several columns named \['x'\]. Rename"):
            lengths_in(tmp_path / "x.parquet", column, measure)


def test_numpy_records_with_many_fields_are_named_as_such(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros(2, [(f"f{i}", "i4") for i in range(999)]))
    with pytest.raises(ValueError, match="contains large records instead of"):
        lengths_in(tmp_path / "x.npy")


@pytest.mark.parametrize(
    ("name", "content"),
    [("x.txt", "1\none\n2\n"), ("x.csv", "n\n1\none\n2\n"), ("x.jsonl", "1\n[\n2\n")],
)
def test_a_file_with_an_error_is_closed(tmp_path, monkeypatch, name, content):
    opened = []
    open_path = pathlib.Path.open

    def record(path, *args):
        opened.append(open_path(path, *args))
        return opened[-1]

    path = tmp_path / name
    path.write_text(content)
    monkeypatch.setattr(pathlib.Path, "open", record)
    with pytest.raises(ValueError, match="line") as error:
        lengths_in(path)
    # The traceback still refers to the readers.
    assert error.tb is not None and opened
    assert all(file.closed for file in opened)


def test_a_length_function_that_exits_is_named(tmp_path):
    (tmp_path / "x.txt").write_text("ab\n")
    with pytest.raises(ValueError, match="`--length-fn` raised SystemExit: 3. Fix the"):
        lengths_in(
            tmp_path / "x.txt", measure=Measure(length_fn=lambda text: sys.exit(3))
        )


@pytest.mark.parametrize("name", [*WRITERS, "x.npz"])
def test_a_missing_column_is_refused(tmp_path, name):
    if name == "x.npz":
        np.savez(tmp_path / name, id=[1], x=[2])
    else:
        WRITERS[name][0](tmp_path / name, [1, 2])
    has_columns = name == "x.npz" or WRITERS[name][1]
    message = (
        "there is no column 'y' among ['id', 'x']. Choose one with `--column`."
        if has_columns
        else "has no columns. Remove `--column y`"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        lengths_in(tmp_path / name, "y")
    if has_columns:
        message = "has columns ['id', 'x']. Choose one with `--column`."
        with pytest.raises(ValueError, match=re.escape(message)):
            lengths_in(tmp_path / name)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([3, 0]), "`lengths[1]=0`: a length must be between 1"),
        (np.array([3, 2**31]), "`lengths[1]=2147483648`: a length must"),
        (np.array([3, np.nan]), "`lengths[1]=nan` is not an integer"),
        (np.array([3.0]), "has dtype float64, not an integer dtype"),
        (np.array([[3]]), "has shape (1, 1)"),
        (np.array(["a"]), "`lengths[0]='a'` is a string, but lengths must be int"),
        (
            np.array([None]),
            "contains Python objects instead of numbers. Save",
        ),
    ],
)
@pytest.mark.parametrize("name", ["x.npy", "x.npz"])
def test_arrays_that_are_not_lengths_are_refused(tmp_path, name, array, message):
    (np.save if name == "x.npy" else np.savez)(tmp_path / name, array)
    with pytest.raises(ValueError, match=re.escape(message)):
        lengths_in(tmp_path / name)


@pytest.mark.parametrize(
    "name", ["x.npz", "x.txt.gz", "x.csv.gz", "x.parquet", "x.array_record"]
)
def test_a_file_truncated_at_any_byte_is_refused(tmp_path, name):
    path = tmp_path / name
    if name == "x.npz":
        np.savez(path, x=lengths_of(0))
    elif name == "x.array_record":
        write_records(path, [text.encode() for text in texts_of(0)])
    else:
        WRITERS[name][0](path, lengths_of(0))
    whole = path.read_bytes()
    column = None if name.startswith(("x.txt", "x.array")) else "x"
    for size in np.linspace(1, len(whole) - 1, 40).astype(int):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="is not a complete") as caught:
            lengths_in(path, column)
        assert "\n" not in str(caught.value)


def test_an_empty_table_is_refused(tmp_path):
    write_parquet(tmp_path / "x.parquet", [])
    write_records(tmp_path / "x.array_record", [])
    for name, column in (("x.parquet", "x"), ("x.array_record", None)):
        with pytest.raises(ValueError, match="is empty. Pass a file with at least"):
            lengths_in(tmp_path / name, column)


def test_an_empty_record_is_named(tmp_path):
    write_records(tmp_path / "x.array_record", [b"a", b""])
    with pytest.raises(ValueError, match="record 1: the length is 0"):
        lengths_in(tmp_path / "x.array_record")
    with pytest.raises(ValueError, match="has no columns. Remove `--column x`"):
        lengths_in(tmp_path / "x.array_record", "x")


def test_a_record_that_is_not_text_is_named(tmp_path):
    write_records(tmp_path / "x.array_record", [b"a", b"\xff"])
    with pytest.raises(ValueError, match="record 1: 'utf-8' codec can't decode"):
        lengths_in(tmp_path / "x.array_record", measure=Measure("words"))


def test_the_error_without_pyarrow_names_the_install_command(tmp_path, monkeypatch):
    write_parquet(tmp_path / "x.parquet", [1])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"pip install 'jaxbucket\[parquet\]'"):
        lengths_in(tmp_path / "x.parquet", "x")


def test_a_path_that_is_not_a_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is a folder. Pass the path of a file"):
        lengths_in(tmp_path)
    for name in ("x.txt", "x.npy", "x.csv", "x.parquet", "x.array_record"):
        message = "cannot be read: No such file or directory. Pass a different file"
        with pytest.raises(ValueError, match=message):
            lengths_in(tmp_path / name)


@pytest.mark.parametrize(
    ("length_fn", "message"),
    [
        (lambda row: row["nowhere"], "`--length-fn` raised KeyError: 'nowhere'. Fix"),
        (lambda row: None, "`--length-fn` returned None, which is not an integer. Fix"),
        (lambda row: 1.5, "`--length-fn` returned 1.5, which is not an integer. Fix"),
        (lambda row: 0, "the length is 0, but it must be from 1"),
    ],
)
def test_a_length_function_without_a_valid_result_is_refused(
    tmp_path, length_fn, message
):
    for name in ("x.jsonl", "x.csv", "x.parquet"):
        WRITERS[name][0](tmp_path / name, [1, 2])
        with pytest.raises(ValueError, match=re.escape(message)):
            lengths_in(tmp_path / name, measure=Measure(length_fn=length_fn))


def test_an_unknown_unit_or_two_rules_are_refused():
    with pytest.raises(ValueError, match="`unit='tokens'`: choose 'bytes'"):
        Measure("tokens")
    with pytest.raises(
        ValueError, match="`--unit bytes` and `--length-fn` both define"
    ):
        Measure("bytes", len)


MODULE = """
import numpy as np
import jaxbucket

LENGTHS = [3, 1, 4, 1, 5]
EXAMPLES = [{"x": [0] * n, "text": "é" * n, "id": n} for n in LENGTHS]
ROWS = []

def array(): return np.array(LENGTHS)
def numbers(): return LENGTHS
def source(): return [{"x": example["x"], "id": 0} for example in EXAMPLES]
def texts(): return [example["text"] for example in EXAMPLES]
def both(): return EXAMPLES
def stream(): return iter(EXAMPLES)
def file(): return jaxbucket.data.TokenFile("tokens")
def nothing(): return None
def dictionary(): return {"x": 1}
def text(): return "abc"
def fails(): raise RuntimeError("two\\nlines")
def leaves(): raise SystemExit(3)
def asks(path): return []
def empty(): return []
def dry(): return iter([])
def floats(): return np.array([1.5])
def breaks():
    yield EXAMPLES[0]
    raise KeyError("gone")

class Held:
    @staticmethod
    def source(): return source()

def length(example): return example["id"]
"""


@pytest.fixture
def module(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the current folder, unique to each test."""
    name = f"given_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return name


EXPECTED = [3, 1, 4, 1, 5]


@pytest.mark.parametrize(
    ("function", "column", "unit"),
    [
        ("array", None, None),
        ("numbers", None, None),
        ("source", None, None),
        ("source", "x", None),
        ("Held.source", None, None),
        ("texts", None, "characters"),
        ("both", "x", None),
        ("both", "text", "characters"),
        ("both", "id", None),
        ("stream", "x", None),
        ("stream", "text", "characters"),
    ],
)
def test_functions_return_sources_lengths_and_iterables(module, function, column, unit):
    result = lengths_by(f"{module}:{function}", column, Measure(unit))
    assert result.tolist() == EXPECTED


def test_a_length_function_of_the_module_is_used(module):
    measure = Measure(length_fn=load_function(f"{module}:length"))
    for function in ("both", "stream"):
        result = lengths_by(f"{module}:{function}", measure=measure)
        assert result.tolist() == EXPECTED


def test_a_source_is_measured_in_workers(module):
    columns = ["text", "id"]
    text, number = measure_function(
        f"{module}:both", columns, Measure("bytes"), num_workers=2
    )
    assert text.tolist() == [2 * n for n in EXPECTED]
    assert number.tolist() == EXPECTED


def test_a_source_with_lengths_is_not_read(module, tmp_path):
    write_token_file(tmp_path / "tokens", [{"x": np.arange(n)} for n in EXPECTED])
    assert lengths_by(f"{module}:file").tolist() == EXPECTED
    assert TokenFile(tmp_path / "tokens").lengths.tolist() == EXPECTED


@pytest.mark.parametrize(
    ("function", "column", "message"),
    [
        ("nothing", None, "returned None. Return a random-access source"),
        ("dictionary", None, "returned {'x': 1}. Return a random"),
        ("text", None, "returned 'abc'. Return a random"),
        ("fails", None, "raised RuntimeError: two lines. Fix the function"),
        ("leaves", None, "raised SystemExit: 3. Fix the function"),
        ("asks", None, "raised TypeError: asks() missing 1 required"),
        ("empty", None, "`source` is empty. Pass a source with at least"),
        ("dry", None, "the function returned no examples. Return"),
        ("floats", None, "`lengths[0]=1.5` is not an integer"),
        ("breaks", "x", "the iterable raised KeyError: 'gone'. Fix"),
        (
            "texts",
            None,
            "`source[0]`: 'ééé' is text, not a length. Measure it with `jaxbucket",
        ),
        ("texts", "x", "'ééé' is not a dict. Remove `--column x`"),
        ("both", "y", "the example has features ['x', 'text', 'id'], but no 'y'"),
        ("LENGTHS", None, "is [3, 1, 4, 1, 5], not a function. Pass the name"),
        (
            "sources",
            None,
            "has no 'sources'. Choose one of its functions: ['array', 'asks',",
        ),
    ],
)
def test_functions_without_valid_results_are_refused(module, function, column, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        lengths_by(f"{module}:{function}", column)
    assert f"{module}:{function}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_modules_that_cannot_be_imported_are_refused(module, tmp_path):
    (tmp_path / f"{module}_bad.py").write_text("import nothing_of_this_name")
    (tmp_path / f"{module}_left.py").write_text("raise SystemExit(2)")
    for name, message in (
        (
            f"{module}_none:f",
            "cannot be imported: ModuleNotFoundError: No module named",
        ),
        (f"{module}_bad:f", "No module named 'nothing_of_this_name'. Run this in the"),
        (f"{module}_left:f", "cannot be imported: SystemExit: 2"),
        ("len", "`len` must be `module:function`, such as"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            load_function(name)


@pytest.mark.parametrize("size", [1, 2, 3, 10, 99, 100, 101, 1000])
def test_a_summary_matches_its_definition(size):
    lengths = np.random.default_rng(size).integers(1, 3 * size + 1, size)
    result = summarize_lengths(lengths, "words")
    ordered = sorted(lengths.tolist())
    for share, length in ((0.5, result.median), (0.9, result.p90), (0.99, result.p99)):
        # The shortest length that covers this share of the examples.
        assert np.mean(lengths <= length) >= share - 1e-9
        assert np.mean(lengths < length) < share
    assert (result.min, result.max) == (ordered[0], ordered[-1])
    assert (result.examples, result.total) == (size, sum(ordered))
    assert result.mean == pytest.approx(np.mean(lengths))
    assert result.distinct == len(set(ordered))
    assert json.loads(result.to_json())["unit"] == "words"


def test_a_total_may_exceed_32_bits():
    assert summarize_lengths([2**31 - 1] * 3).total == 3 * (2**31 - 1)
