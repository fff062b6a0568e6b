"""Several columns of a file or of a function's examples, measured in one pass."""

import csv
import gzip
import io
import json
import os
import pathlib
import re
import sys
import threading

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from jaxbucket.data.lengths.files import read_lengths
from jaxbucket.data.lengths.functions import load_function, measure_function
from jaxbucket.data.lengths.values import Measure

# More rows than a reader holds at a time.
ROWS = 5000
NAMES = ["en", "id", "de", "a.b"]
LINES = ["x.csv", "x.tsv", "x.csv.gz", "x.jsonl", "x.jsonl.gz"]
FORMATS = [*LINES, "x.parquet", "x.npz"]
CHOICES = [["de", "en"], ["a.b", "id", "en"]]


def lengths_of(seed: int, size: int = ROWS) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.integers(1, 50, size) for name in NAMES}


def write(path: pathlib.Path, columns: dict[str, list]) -> None:
    """Writes columns to a file of the format of its suffix."""
    rows = list(zip(*columns.values(), strict=True))
    text = io.StringIO()
    if ".csv" in path.name or ".tsv" in path.name:
        writer = csv.writer(text, delimiter="\t" if ".tsv" in path.name else ",")
        writer.writerows([list(columns), *rows])
    for row in rows if ".jsonl" in path.name else []:
        text.write(json.dumps(dict(zip(columns, row, strict=True))) + "\n")
    if path.suffix == ".npz":
        np.savez(path, **{name: np.array(x) for name, x in columns.items()})
    elif path.suffix == ".parquet":
        parquet.write_table(pyarrow.table(columns), path, row_group_size=3000)
    else:
        data = text.getvalue().encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def assert_columns(
    path: pathlib.Path, expected: dict[str, np.ndarray], measure: Measure | None = None
) -> None:
    """Compares columns that are read together with those read one at a time."""
    for chosen in CHOICES:
        together = read_lengths(path, chosen, measure)
        assert len(together) == len(chosen)
        for name, lengths in zip(chosen, together, strict=True):
            np.testing.assert_array_equal(lengths, expected[name])
            (alone,) = read_lengths(path, [name], measure)
            np.testing.assert_array_equal(lengths, alone)
            assert lengths.dtype == alone.dtype


@pytest.mark.parametrize("name", FORMATS)
def test_columns_read_together_are_those_read_one_by_one(tmp_path, name):
    lengths = lengths_of(0)
    write(tmp_path / name, {key: x.tolist() for key, x in lengths.items()})
    assert_columns(tmp_path / name, lengths)


@pytest.mark.parametrize("name", ["x.csv", "x.jsonl.gz", "x.parquet"])
@pytest.mark.parametrize("unit", ["bytes", "words"])
def test_texts_in_several_columns_are_measured(tmp_path, name, unit):
    lengths = lengths_of(1, 300)
    word = {"bytes": "é", "words": "é\t"}[unit]
    texts = {key: [word * n for n in x] for key, x in lengths.items()}
    write(tmp_path / name, texts)
    size = {"bytes": 2, "words": 1}[unit]
    expected = {key: size * x for key, x in lengths.items()}
    assert_columns(tmp_path / name, expected, Measure(unit))


@pytest.mark.parametrize("name", ["x.csv", "x.jsonl", "x.parquet"])
def test_a_length_function_receives_each_column(tmp_path, name):
    write(tmp_path / name, {"a": ["x", "yy"], "b": ["zzz", "w"]})
    received = []
    measure = Measure(length_fn=lambda text: received.append(text) or len(text))
    a, b = read_lengths(tmp_path / name, ["a", "b"], measure)
    assert a.tolist() == [1, 2] and b.tolist() == [3, 1]
    assert received == ["x", "zzz", "yy", "w"]


def test_parquet_columns_of_different_types_are_measured(tmp_path):
    sizes = lengths_of(2)
    columns = {
        "tokens": [[7] * n for n in sizes["en"]],
        "text": ["word " * n for n in sizes["de"]],
        "frames": sizes["id"].tolist(),
    }
    write(tmp_path / "x.parquet", columns)
    text, tokens, frames = read_lengths(
        tmp_path / "x.parquet", ["text", "tokens", "frames"], Measure("words")
    )
    np.testing.assert_array_equal(text, sizes["de"])
    np.testing.assert_array_equal(tokens, sizes["en"])
    np.testing.assert_array_equal(frames, sizes["id"])


def test_a_parquet_column_may_have_the_name_of_a_nested_one(tmp_path):
    write(tmp_path / "x.parquet", {"a.b": [1, 2], "a": [3, 4]})
    a, nested = read_lengths(tmp_path / "x.parquet", ["a", "a.b"])
    assert a.tolist() == [3, 4] and nested.tolist() == [1, 2]


@pytest.mark.parametrize("name", LINES)
def test_a_pipe_that_can_be_read_only_once_is_measured(tmp_path, name):
    lengths = lengths_of(3)
    write(tmp_path / f"file-{name}", {key: x.tolist() for key, x in lengths.items()})
    data = (tmp_path / f"file-{name}").read_bytes()
    os.mkfifo(tmp_path / name)
    writer = threading.Thread(
        target=(tmp_path / name).write_bytes, args=(data,), daemon=True
    )
    writer.start()
    results = read_lengths(tmp_path / name, NAMES)
    writer.join()
    for key, result in zip(NAMES, results, strict=True):
        np.testing.assert_array_equal(result, lengths[key])


def test_an_archive_of_arrays_is_opened_once(tmp_path, monkeypatch):
    write(tmp_path / "x.npz", {name: [1, 2] for name in NAMES})
    opened = []
    open_path = pathlib.Path.open
    monkeypatch.setattr(
        pathlib.Path, "open", lambda *args: opened.append(args) or open_path(*args)
    )
    assert len(read_lengths(tmp_path / "x.npz", NAMES)) == len(NAMES)
    assert len(opened) == 1


def test_a_table_is_read_once_and_only_its_columns(tmp_path, monkeypatch):
    passes = []

    class Recorded(parquet.ParquetFile):
        def iter_batches(self, *args, columns, **options):
            passes.append(columns)
            return super().iter_batches(*args, columns=columns, **options)

    write(tmp_path / "x.parquet", {name: [1, 2] for name in NAMES})
    monkeypatch.setattr(parquet, "ParquetFile", Recorded)
    read_lengths(tmp_path / "x.parquet", ["de", "en"])
    assert passes == [["de", "en"]]


AB = ["a", "b"]


@pytest.mark.parametrize(
    ("name", "content", "columns", "message"),
    [
        (
            "x.csv",
            "a,b\n1,2\n3,\n",
            AB,
            "`x.csv`, column 'b', line 3: the length is missing. Fill it in, or remove",
        ),
        ("x.csv", "a,b\n1,2\n3,\n,4\n", AB, "column 'b', line 3: the length is miss"),
        ("x.csv", "a,b\n1,2\n3,\n,4\n", ["a"], "column 'a', line 4: the length is m"),
        ("x.csv", "a,b\n1,two\n", ["b", "a"], "column 'b', line 2: 'two' is not an"),
        ("x.csv", "a\n1\nx\n", [], "column 'a', line 3: 'x' is not an integer"),
        (
            "x.jsonl",
            '{"a": 1, "b": 2}\n{"a": 1, "b": null}\n{"a": 0, "b": 1}\n',
            AB,
            "`x.jsonl`, field 'b', line 2: None is not an integer",
        ),
        (
            "x.jsonl",
            '{"a": 1, "b": 2}\n{"a": 1}\n',
            AB,
            "line 2 is an object with fields ['a'], which has no field 'b'. Fix the",
        ),
        ("x.jsonl", '{"a": 1}\n', AB, "there is no column 'b' among ['a']"),
        ("x.csv", "a,c\n1,2\n", AB, "there is no column 'b' among ['a', 'c']"),
        ("x.txt", "1\n", AB, "has no columns. Remove `--column a --column b`."),
    ],
)
def test_the_first_bad_line_is_named_with_its_column(
    tmp_path, monkeypatch, name, content, columns, message
):
    monkeypatch.chdir(tmp_path)
    pathlib.Path(name).write_text(content)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_lengths(pathlib.Path(name), columns)


def test_the_first_bad_row_of_a_table_is_named(tmp_path):
    columns = {"a": [1] * ROWS + [0], "b": [1] * (ROWS - 1) + [-3, 2]}
    write(tmp_path / "x.parquet", columns)
    with pytest.raises(ValueError, match=f"'b' row {ROWS - 1}: the length is -3"):
        read_lengths(tmp_path / "x.parquet", AB)


def test_columns_of_an_array_without_a_name_are_refused(tmp_path):
    np.save(tmp_path / "x.npy", [1, 2])
    message = "has one array without a name. Remove `--column a --column b`."
    with pytest.raises(ValueError, match=re.escape(message)):
        read_lengths(tmp_path / "x.npy", AB)


MODULE = """
import numpy as np

CALLS, READS = [], []
SIZES = [(1 + n % 7, 1 + n % 5) for n in range(5000)]
PAIRS = [{"a": [0] * a, "b": [0] * b} for a, b in SIZES]

class Source:
    def __len__(self): return len(PAIRS)
    def __getitem__(self, index):
        READS.append(index)
        return PAIRS[index]

def source():
    CALLS.append("source")
    return Source()

def stream():
    CALLS.append("stream")
    for index, pair in enumerate(PAIRS):
        READS.append(index)
        # Another call yields other examples.
        yield {key: [0] * (len(x) + len(CALLS) - 1) for key, x in pair.items()}

def array(): return np.array([1, 2])
def bad_list(): return [{"a": 1, "b": 2}, {"a": 1, "b": 0}, {"a": 0, "b": 1}]
def bad_stream(): yield from bad_list()
"""


@pytest.fixture
def module(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the current folder, unique to each test."""
    name = f"pairs_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return name


@pytest.mark.parametrize("function", ["source", "stream"])
def test_a_function_is_called_once_and_each_example_is_read_once(module, function):
    b, a = measure_function(f"{module}:{function}", ["b", "a"])
    state = load_function(f"{module}:{function}").__globals__
    np.testing.assert_array_equal(np.stack([a, b], axis=1), state["SIZES"])
    assert state["CALLS"] == [function]
    assert state["READS"] == list(range(5000))


@pytest.mark.parametrize(
    ("function", "columns", "message"),
    [
        ("bad_list", AB, "`source[1]`, sequence 'b': the length is 0"),
        ("bad_stream", AB, "feature 'b' of example 1: the length is 0"),
        ("bad_stream", ["a"], "feature 'a' of example 2: the length is 0"),
        ("bad_stream", ["a", "c"], "example has features ['a', 'b'], but no 'c'"),
        ("array", AB, "is not a dict. Remove `--column a`"),
        ("array", ["a"], "is not a dict. Remove `--column a`"),
    ],
)
def test_the_first_example_without_a_length_is_named(
    module, function, columns, message
):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        measure_function(f"{module}:{function}", columns)
    assert f"{module}:{function}" in str(caught.value)
