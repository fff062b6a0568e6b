"""Lengths in files are those that numpy and pyarrow read, and nothing is silent."""

import bz2
import gzip
import json

import numpy as np
import pytest

from jaxbucket.data.length_files import read_lengths

pyarrow = pytest.importorskip("pyarrow")

TEXTS = ["to be", "or not  to be ", "é", ' "x']
SIZES = {
    "words": [2, 4, 1, 1],
    "characters": [5, 14, 1, 3],
    "bytes": [5, 14, 2, 3],
}
TOKENS = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]


@pytest.fixture(name="write")
def write_fixture(tmp_path):
    def write(name: str, text: str | bytes):
        opens = {".gz": gzip.open, ".bz2": bz2.open}
        path = tmp_path / name
        with opens.get(path.suffix, open)(path, "wb") as file:
            file.write(text.encode() if isinstance(text, str) else text)
        return path

    return write


def json_lines(**columns) -> str:
    rows = zip(*columns.values(), strict=True)
    return "".join(
        json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in rows
    )


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
def test_lists_and_texts_are_measured(tmp_path, write, suffix):
    if suffix == ".parquet":
        from pyarrow import parquet

        path = tmp_path / "rows.parquet"
        table = pyarrow.table({"tokens": TOKENS, "text": TEXTS})
        parquet.write_table(table, path, row_group_size=2)
    else:
        path = write(f"rows{suffix}", json_lines(tokens=TOKENS, text=TEXTS))
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


@pytest.mark.parametrize("name", ["a.csv", "a.parquet", "a.npy"])
def test_a_missing_file_is_reported(tmp_path, name):
    with pytest.raises(FileNotFoundError, match="No such file"):
        read_lengths(tmp_path / name)


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
    path = write("rows.jsonl", json_lines(text=texts))
    (found,) = read_lengths(path, ["text"], "characters")
    assert found.tolist() == [len(text) for text in texts]


@pytest.mark.parametrize(
    ("name", "text", "shown"),
    [
        ("a.csv", "n,m\n1,2\n3,\n", "row 1 is null"),
        ("a.csv", "m\n1\n\n3\n", "row 1 is null"),
        ("a.csv", "m\n1\n" + "\n" * 9000 + "3\n", "row 1 is null"),
        ("a.csv", "n,m\n1,2\n3,\n\n", "row 1 is null"),
        ("a.csv", "m\n1\nNA\n", "--unit"),
        ("a.csv", 'm\n1\n""\n', "--unit"),
        ("a.csv", b"m\nab\xff\n", "UTF-8"),
        ("a.tsv", b"m\nab\xff\n", "UTF-8"),
        ("a.csv", "m\n1\n0\n", r"lengths\[1\]=0"),
        ("a.csv", "m\n1\n2.5\n", "`lengths`"),
        ("a.csv", "m\nab\n", "--unit"),
        ("a.csv", "5\n3\n4\n", "header"),
        ("a.csv", " 5\n3\n4\n", "header"),
        ("a.csv", "n\n3\n4\n", "`--column`"),
        ("a.csv", "m,n\n1,2\n3\n", "Expected 2 columns"),
        ("a.jsonl", json_lines(m=[[1, 2], None]), "row 1 is null"),
        ("a.jsonl", '{"m": [1]}\n{"n": [1]}\n', "row 1 is null"),
        ("a.jsonl", json_lines(m=[[[1], [2]]]), "nested"),
        ("a.jsonl", json_lines(m=[[]]), r"lengths\[0\]=0"),
        ("a.jsonl", json_lines(m=[True]), "`lengths`"),
        ("a.jsonl", json_lines(m=[3000000000]), "2147483647"),
        ("a.jsonl", "5\n6\n", "a.jsonl"),
        ("a.jsonl", '{"m": 1', "a.jsonl"),
        ("a.parquet", "m", "a.parquet"),
        ("a.npy", b"\x93NUMPY", "a.npy"),
        ("a.npz", b"PK", "a.npz"),
        ("a.txt", "1\n2\n", "module:function"),
    ],
)
def test_files_without_lengths_are_refused(write, name, text, shown):
    path = write(name, text)
    with pytest.raises(Exception, match=shown) as error:
        read_lengths(path, () if shown in ("header", "a.npy") else ["m"])
    assert str(path) in "".join(
        [str(error.value), *getattr(error.value, "__notes__", ())]
    )


@pytest.mark.parametrize("columns", [(), ["a", "a"], ["a", "c"]])
@pytest.mark.parametrize("name", ["a.npz", "a.jsonl"])
def test_columns_must_be_named_once(tmp_path, write, name, columns):
    if name == "a.npz":
        np.savez(tmp_path / name, a=[1], b=[2])
    else:
        write(name, json_lines(a=[1], b=[2]))
    with pytest.raises(ValueError, match="`--column`"):
        read_lengths(tmp_path / name, columns)


def test_a_unit_measures_text_only(write):
    # pyarrow reads digits as numbers.
    path = write("a.csv", "m\n12\n1984\n")
    with pytest.raises(ValueError, match="`--unit`"):
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
