"""Lengths in files are those that numpy and pyarrow read, and nothing is silent."""

import bz2
import gzip
import json
import math
import pathlib
import re
from fractions import Fraction

import numpy as np
import pytest

from jaxbucket.data.length_files import read_lengths, suffix_of

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

RNG = np.random.default_rng(0)
TEXTS = ["to be", "or not  to be ", "é", ' "x']
SIZES = {
    "words": [2, 4, 1, 1],
    "characters": [5, 14, 1, 3],
    "bytes": [5, 14, 2, 3],
}
TOKENS = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]


@pytest.fixture(name="write")
def write_fixture(tmp_path):
    def write(name: str, content: str | bytes | list):
        """Writes content, or rows in the format of the suffix."""
        opens = {".gz": gzip.open, ".bz2": bz2.open}
        path = tmp_path / name
        if isinstance(content, list) and path.suffix == ".parquet":
            table = pyarrow.Table.from_pylist(content)
            parquet.write_table(table, path, row_group_size=2)
            return path
        if isinstance(content, list):
            is_array = path.suffix == ".json"
            lines = "".join(json.dumps(row) + "\n" for row in content)
            content = json.dumps(content, indent=2) if is_array else lines
        with opens.get(path.suffix, open)(path, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        return path

    return write


def rows_of(**columns) -> list[dict]:
    rows = zip(*columns.values(), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".csv", ".tsv", ".csv.gz"])
def test_integers_are_lengths(tmp_path, write, suffix):
    rows = "".join(f"{n}{',' if 'csv' in suffix else chr(9)}{2 * n}\n" for n in (3, 1))
    head = "a,b\n" if "csv" in suffix else "a\tb\n"
    path = tmp_path / f"lengths{suffix}"
    if suffix == ".npy":
        np.save(path, np.array([3, 1], np.uint8))
    elif suffix == ".npz":
        np.savez(path, a=[3, 1], b=[6, 2])
    else:
        write(path.name, head + rows)
    columns = () if suffix == ".npy" else ("b", "a")
    found = read_lengths(path, columns)
    assert [x.tolist() for x in found] == [[6, 2], [3, 1]][-len(found) :]
    assert all(x.dtype == np.int32 for x in found)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".ndjson.bz2", ".parquet"])
def test_lists_and_texts_are_measured(write, suffix):
    path = write(f"rows{suffix}", rows_of(tokens=TOKENS, text=TEXTS))
    (found,) = read_lengths(path, ["tokens"])
    assert found.tolist() == [3, 1, 2, 4]
    for unit, sizes in SIZES.items():
        found = read_lengths(path, ["text", "tokens"], unit)
        assert [x.tolist() for x in found] == [sizes, [3, 1, 2, 4]]


def test_quotes_and_newlines_of_csv_but_not_of_tsv(write):
    csv = write("a.csv", 'text\n"to be\nor ""not"""\nx\n')
    assert read_lengths(csv, (), "characters")[0].tolist() == [14, 1]
    tsv = write("a.tsv", 'text\tn\n"to be\t3\nx"\t1\n')
    assert read_lengths(tsv, ["text"], "characters")[0].tolist() == [6, 2]


# What a value may be, and where it may be


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".json", ".parquet"])
def test_dots_name_fields_in_fields(write, suffix):
    rows = [
        {"meta": {"frames": 3, "text": {"tokens": [1, 2]}}, "a.b": 7, "a": {"b": 8}},
        {"meta": {"frames": 5, "text": {"tokens": [1]}}, "a.b": 9, "a": {"b": 6}},
    ]
    path = write(f"rows{suffix}", rows)
    # A name that is that of a column is not a field in a field.
    found = read_lengths(path, ["meta.frames", "meta.text.tokens", "a.b"])
    assert [x.tolist() for x in found] == [[3, 5], [2, 1], [7, 9]]


@pytest.mark.parametrize("second", ["{}", '{"frames": null}', "null"])
def test_a_missing_field_in_a_field_is_null(write, second):
    path = write("a.jsonl", f'{{"m": {{"frames": 3}}}}\n{{"m": {second}}}\n')
    with pytest.raises(ValueError, match="'m.frames', row 1 is null"):
        read_lengths(path, ["m.frames"])


@pytest.mark.parametrize("scale", [1, 50, 100, 0.25, 16_000])
def test_scaled_numbers_are_rounded_up(tmp_path, write, scale):
    values = RNG.integers(1, 100_000, 500)
    expected = [math.ceil(Fraction(int(x), 100) * Fraction(scale)) for x in values]
    texts = [f"{x // 100}.{x % 100:02}" for x in values]
    path = write("a.csv", "\n".join(["s", *texts]) + "\n")
    assert read_lengths(path, ["s"], scales=[scale])[0].tolist() == expected
    path = tmp_path / "a.npy"
    np.save(path, np.array(texts, np.float64))
    assert read_lengths(path, scales=[scale])[0].tolist() == expected
    # Integers and numbers of elements are scaled as well.
    np.save(path, values)
    expected = [math.ceil(int(x) * Fraction(scale)) for x in values]
    assert read_lengths(path, scales=[scale])[0].tolist() == expected
    (found,) = read_lengths(write("a.jsonl", rows_of(x=TOKENS)), scales=[scale])
    assert found.tolist() == [math.ceil(len(x) * Fraction(scale)) for x in TOKENS]


@pytest.mark.parametrize(
    ("lengths", "scale"), [(np.arange(1, 5000), 100), (np.array([10**7, 12345678]), 1)]
)
def test_float32_is_scaled_without_its_rounding_errors(tmp_path, lengths, scale):
    np.save(tmp_path / "a.npy", (lengths / scale).astype(np.float32))
    (found,) = read_lengths(tmp_path / "a.npy", scales=[scale])
    assert found.tolist() == lengths.tolist()


def test_columns_of_different_sizes_are_measured(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(1, 5), y=np.arange(1, 4))
    found = read_lengths(tmp_path / "a.npz", ["x", "y"])
    assert [len(x) for x in found] == [4, 3]


def test_each_column_may_have_its_own_scale(write):
    path = write("a.csv", "s,n\n1.5,3\n0.25,4\n")
    both = read_lengths(path, ["s", "n"], scales=[100, 1])
    assert [x.tolist() for x in both] == [[150, 25], [3, 4]]
    both = read_lengths(path, ["n", "s"], scales=[2])
    assert [x.tolist() for x in both] == [[6, 8], [3, 1]]
    with pytest.raises(ValueError, match="`scale"):
        read_lengths(path, ["s", "n"], scales=[1, 2, 3])
    with pytest.raises(ValueError, match="`scale"):
        read_lengths(path, ["s"], scales=[1, 2])
    # The unit is that of text.
    path = write("c.jsonl", rows_of(s=[1.5, 2], text=["to be", ""], n=[3, 1]))
    found = read_lengths(path, ["s", "text", "n"], "characters", scales=[100, 1, 1])
    assert [x.tolist() for x in found] == [[150, 200], [5, 0], [3, 1]]
    with pytest.raises(ValueError, match="`scale"):
        read_lengths(path, ["s", "text"], "characters", scales=[100])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -1.5, 0.0, 1e300])
def test_numbers_that_no_scale_makes_lengths_are_refused(tmp_path, bad):
    np.save(tmp_path / "a.npy", [1.5, bad])
    with pytest.raises(ValueError, match=r"lengths\[1\]"):
        read_lengths(tmp_path / "a.npy", scales=[100])


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".csv.bz2"])
def test_semicolons_separate_csv_without_commas_in_the_header(write, suffix):
    rows = 'id;text;n\n1;"a; b, c";3\n2;d, e;4\n'
    path = write(f"a{suffix}", rows)
    assert read_lengths(path, ["n"])[0].tolist() == [3, 4]
    assert read_lengths(path, ["text"], "characters")[0].tolist() == [7, 4]
    path = write(f"b{suffix}", "n,a;b\n3,x;y\n4,z\n")
    assert read_lengths(path, ["n"])[0].tolist() == [3, 4]


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_an_array_of_json_is_a_table_or_a_column(write, suffix):
    rows = [{"n": 3}, {"n": 4, "text": "to be"}, {"text": None, "n": 5}]
    path = write(f"a{suffix}", json.dumps(rows, indent=1))
    assert read_lengths(path, ["n"])[0].tolist() == [3, 4, 5]
    for values, expected in (([3, 1, 2], [3, 1, 2]), (TOKENS, [3, 1, 2, 4])):
        path = write(f"b{suffix}", json.dumps(values))
        assert read_lengths(path)[0].tolist() == expected
    path = write(f"c{suffix}", json.dumps(TEXTS))
    assert read_lengths(path, (), "words")[0].tolist() == SIZES["words"]


def test_a_function_measures_any_value(tmp_path, write):
    chats = [[["a", "bc"], ["d"]], [["ef"]], [[], ["g"]]]
    path = write("a.jsonl", rows_of(m=chats, s=[0.5, 1.5, 2.5]))

    def letters(messages):
        return len("".join(sum(messages, [])))

    assert read_lengths(path, ["m"], letters)[0].tolist() == [4, 2, 1]
    assert read_lengths(path, ["s"], lambda x: int(2 * x))[0].tolist() == [1, 3, 5]
    # Its results are scaled.
    assert read_lengths(path, ["m"], letters, [0.5])[0].tolist() == [2, 1, 1]
    np.save(tmp_path / "a.npy", [3, 4])
    assert read_lengths(tmp_path / "a.npy", (), lambda x: x + 1)[0].tolist() == [4, 5]


@pytest.mark.parametrize(
    ("function", "shown"),
    [
        (lambda x: x / 0, "row 0"),
        (lambda x: 9 // (x - 4), "row 1"),
        (lambda x: x + 0.5, "--length-fn"),
        (str, "`lengths`"),
        (lambda x: x - 4, r"lengths\[0\]=-1"),
    ],
)
def test_functions_that_return_no_length_are_refused(write, function, shown):
    path = write("a.csv", "n\n3\n4\n")
    with pytest.raises((ValueError, ZeroDivisionError)) as error:
        read_lengths(path, (), function)
    notes = getattr(error.value, "__notes__", ())
    assert re.search(shown, "".join([str(error.value), *notes]))


@pytest.mark.parametrize("name", ["a.npy", "a.npz", "a.parquet", "a.jsonl", "a.json"])
def test_the_first_bytes_tell_the_format(tmp_path, write, name):
    if name == "a.npy":
        np.save(tmp_path / name, [1])
    elif name == "a.npz":
        np.savez(tmp_path / name, [1])
    else:
        write(name, [{"n": 1}])
    assert suffix_of((tmp_path / name).read_bytes()) == pathlib.Path(name).suffix
    assert suffix_of(b"a\tb\n1,2\t3\n") == ".tsv"
    assert suffix_of(b"a;b\n1;2\t3\n") == suffix_of(b"") == ".csv"


def test_a_missing_file_is_reported(tmp_path):
    with pytest.raises(FileNotFoundError, match="No such file"):
        read_lengths(tmp_path / "a.parquet")


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".csv.gz"])
@pytest.mark.parametrize("blank", ["\n", "\r\n\r\n", "\n" * 9000])
def test_blank_lines_at_the_end_are_ignored(write, suffix, blank):
    (numbers,) = read_lengths(write(f"a{suffix}", f"n\n3\n5\n{blank}"))
    assert numbers.tolist() == [3, 5]
    (words,) = read_lengths(
        write(f"b{suffix}", f"text\nto be\nx\n{blank}"), (), "words"
    )
    assert words.tolist() == [2, 1]
    comma = "\t" if suffix == ".tsv" else ","
    path = write(f"c{suffix}", f"n{comma}m\n3{comma}x\n5{comma}y\n{blank}")
    assert read_lengths(path, ["n"])[0].tolist() == [3, 5]


def test_long_lines_and_many_rows_are_read(write):
    texts = ["x" * 3_000_000, *["y" * (1 + i % 7) for i in range(20_000)]]
    path = write("rows.jsonl", rows_of(text=texts))
    (found,) = read_lengths(path, ["text"], "characters")
    assert found.tolist() == [len(text) for text in texts]


@pytest.mark.parametrize(
    ("name", "content", "shown"),
    [
        ("a.csv", "m\n1\n\n3\n", "row 1 is null"),
        ("a.csv", "m\n1\n" + "\n" * 9000 + "3\n", "row 1 is null"),
        ("a.csv", "n,m\n1,2\n3,\n\n", "row 1 is null"),
        ("a.csv", "m\n1\nNA\n", "--unit"),
        ("a.csv", 'm\n1\n""\n', "--unit"),
        ("a.parquet", "m", "a.parquet"),
        ("a.csv", b"m\nab\xff\n", "UTF-8"),
        ("a.tsv", b"m\nab\xff\n", "UTF-8"),
        ("a.csv", "m\n1\n0\n", r"lengths\[1\]=0"),
        ("a.csv", "m\n1\n2.5\n", "such as 2.5.*--scale.*--length-fn"),
        ("a.csv", "m\n1.0\n2.0\n", "--scale.*--length-fn"),
        ("a.jsonl", rows_of(m=[1, 12.34]), "such as 12.34.*--scale.*--length-fn"),
        ("a.json", [{"m": 0.5}], "such as 0.5.*--scale.*--length-fn"),
        ("a.json", '{"m": 1}\n{"m": 2}\n', ".jsonl"),
        ("a.json", json.dumps({"m": [1, 2]}), "JSON array"),
        ("a.json", "[1, 2", "JSON array"),
        ("a.json", [{"m": 1}, 2], "a.json"),
        ("a.json", [{"m": 1}, {"n": 2}], "row 1 is null"),
        ("a.csv", "m\nab\n", "--unit"),
        ("a.csv", "5\n3\n4\n", "header"),
        ("a.csv", "n\n3\n4\n", "`--column`"),
        ("a.csv", "m,n\n1,2\n3\n", "Expected 2 columns"),
        ("a.jsonl", '{"m": [1]}\n{"n": [1]}\n', "row 1 is null"),
        ("a.jsonl", rows_of(m=[[[1], [2]]]), "--length-fn"),
        ("a.jsonl", rows_of(m=[{"frames": 1}]), "--length-fn"),
        ("a.jsonl", rows_of(m=[[]]), r"lengths\[0\]=0"),
        ("a.jsonl", rows_of(m=[True]), "`lengths`"),
        ("a.jsonl", rows_of(m=[3000000000]), "2147483647"),
        ("a.jsonl", "5\n6\n", "a.jsonl"),
        ("a.jsonl", '{"m": 1', "a.jsonl"),
        ("a.npy", b"\x93NUMPY", "a.npy"),
        ("a.npz", b"PK", "a.npz"),
        ("a.txt", "1\n2\n", "module:function"),
    ],
)
def test_files_without_lengths_are_refused(write, name, content, shown):
    path = write(name, content)
    with pytest.raises(Exception, match=shown) as error:
        read_lengths(path, () if shown in ("header", "a.npy") else ["m"])
    assert str(path) in "".join(
        [str(error.value), *getattr(error.value, "__notes__", ())]
    )


@pytest.mark.parametrize(
    "columns", [(), ["a", "a"], ["a", "c"], ["a.b"], ["c.d"], ["a."]]
)
@pytest.mark.parametrize("name", ["a.npz", "a.jsonl"])
def test_columns_must_be_named_once(tmp_path, write, name, columns):
    if name == "a.npz":
        np.savez(tmp_path / name, a=[1], b=[2])
    else:
        write(name, rows_of(a=[1], b=[2]))
    with pytest.raises(ValueError, match="`--column`"):
        read_lengths(tmp_path / name, columns)


def test_a_unit_measures_text_only(write):
    # pyarrow reads digits as numbers.
    path = write("a.csv", "m\n12\n1984\n")
    with pytest.raises(ValueError, match="--unit"):
        read_lengths(path, ["m"], "words")


@pytest.mark.parametrize("array", [[[1]], [1.5], [], np.array([{}], object)])
def test_arrays_that_are_not_lengths_are_refused(tmp_path, array):
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(ValueError, match="a.npy"):
        read_lengths(tmp_path / "a.npy")


def test_a_missing_pyarrow_names_the_extra(write, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"jaxbucket\[files\]"):
        read_lengths(write("a.csv", "n\n1\n"))


def test_an_example_needs_a_length_in_some_column(tmp_path):
    path = tmp_path / "pairs.csv"
    path.write_text("a,b\n1,0\n0,0\n")
    with pytest.raises(ValueError, match="example 1 "):
        read_lengths(path, ["a", "b"])
    path.write_text("a,b\n1,-1\n")
    with pytest.raises(ValueError, match="-1"):
        read_lengths(path, ["a", "b"], scales=[1, 0.5])
