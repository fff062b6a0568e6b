"""Difficulty indices: compared with numpy, and with damaged files."""

import errno
import json
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbucket as jb
from jaxbucket.schedule.difficulty_index import share_checksum

ROOT = pathlib.Path(__file__).parents[2]
MESH = jb.data_mesh()
SIZE = 1003


def difficulties(dtype=np.float32):
    return (10 * np.random.default_rng(0).random(SIZE)).astype(dtype)


@pytest.fixture(name="folder")
def folder_fixture(tmp_path):
    jb.sort.write_difficulty_index(tmp_path / "index", difficulties(), MESH)
    return tmp_path / "index"


@pytest.mark.parametrize("dtype", ["?", "i1", "i4", "u4", "i8", "f2", "f4", "f8"])
def test_the_index_is_a_stable_argsort(tmp_path, dtype):
    values = difficulties(dtype)
    index = jb.sort.write_difficulty_index(tmp_path / "index", values, MESH)
    index.check()
    assert len(index) == SIZE and index.examples.dtype == np.int32
    np.testing.assert_array_equal(index.examples, np.argsort(values, kind="stable"))
    np.testing.assert_array_equal(index.difficulty, values)
    np.testing.assert_array_equal(index.ranks()[index.examples], np.arange(SIZE))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index"]
    assert len(list((tmp_path / "index").iterdir())) == 3


def test_percentiles_and_between_return_slices_of_the_order(folder):
    index, values = jb.schedule.DifficultyIndex(folder), difficulties()
    quarters = [index.percentiles(x, x + 25) for x in (0, 25, 50, 75)]
    np.testing.assert_array_equal(np.concatenate(quarters), index.examples)
    assert values[quarters[0]].max() <= values[quarters[1]].min()
    assert index.percentiles(30, 30).size == 0
    between = index.between(2, 5)
    assert set(between) == set(np.flatnonzero((2 <= values) & (values < 5)))
    assert np.shares_memory(between, index.examples)
    assert index.between(5, 2).size == index.between(99, 100).size == 0
    assert index.between(-1, 11).size == SIZE
    # Bounds of any type are compared as numbers.
    assert index.between(np.float32(2), np.int64(5)).size == between.size
    for low, high in ((-1, 5), (5, 101), (60, 40), (0, float("nan"))):
        with pytest.raises(ValueError, match="must be percentiles from 0"):
            index.percentiles(low, high)


def test_a_curriculum_accepts_an_index(folder, tmp_path):
    values, lengths = difficulties(), np.full(SIZE, 8)
    plan = jb.BucketPlan.from_shapes([(10, 8)])
    index = jb.schedule.DifficultyIndex(folder)
    orders = [jb.Curriculum(x, jb.schedule.LinearPacing(0.1)) for x in (values, index)]
    assert str(orders[0]) == str(orders[1])
    one, other = (jb.BatchSchedule(plan, lengths, order=x, seed=1) for x in orders)
    for step in (0, 50, 100):
        np.testing.assert_array_equal(one[step].rows, other[step].rows)
    kept = np.arange(SIZE) % 3 > 0
    # If the index is sorted by process, the difficulty of an example is its rank.
    by_process = jb.sort.write_difficulty_index(
        tmp_path / "by_process", values, MESH, sorted_by="process"
    )
    order = jb.Curriculum(by_process, jb.schedule.LinearPacing(0.1))
    np.testing.assert_array_equal(order.difficulty, by_process.ranks())
    by_value = jb.schedule.ByValue(jb.schedule.LinearPacing(), low=0, high=9)
    with pytest.raises(ValueError, match="of `difficulty` is a `ByValue`, but its"):
        jb.Curriculum(by_process, by_value)
    # Several metrics use the order of the index, too.
    other = np.arange(SIZE) * 7 % 101
    pairs = [jb.Curriculum({"a": x, "b": other}, by_value) for x in (values, index)]
    assert str(pairs[0]) == str(pairs[1])
    for kept_or_none in (None, kept):
        ranks = [pair._metrics[0].ranks(kept_or_none) for pair in pairs]
        for one, two in zip(*ranks, strict=True):
            np.testing.assert_array_equal(one, two)


def test_sorting_by_process_with_one_process_sorts_all_examples(tmp_path):
    values = difficulties()
    index = jb.sort.write_difficulty_index(
        tmp_path / "index", values, MESH, sorted_by="process"
    )
    np.testing.assert_array_equal(index.examples, np.argsort(values, kind="stable"))
    with pytest.raises(ValueError, match="`between` requires an index with `sorted_by"):
        index.between(0, 1)


def test_an_existing_index_is_returned_or_rejected(folder, monkeypatch):
    values = difficulties()
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    monkeypatch.setattr("jaxbucket.sort.difficulty.sample_sort", None)
    again = jb.sort.write_difficulty_index(folder, values, MESH)
    assert before == {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    np.testing.assert_array_equal(again.difficulty, values)
    for other, options in (
        (values + 1, {}),
        (values[:-1], {}),
        (values, {"sorted_by": "process"}),
    ):
        with pytest.raises(ValueError, match="has an index of different difficulties"):
            jb.sort.write_difficulty_index(folder, other, MESH, **options)


def test_a_folder_with_other_files_is_not_overwritten(tmp_path):
    (tmp_path / "notes.txt").write_text("contents")
    with pytest.raises(ValueError, match="exists but is not an index. Pass a diff"):
        jb.sort.write_difficulty_index(tmp_path, difficulties(), MESH)
    assert (tmp_path / "notes.txt").read_text() == "contents"


def test_partial_folders_of_earlier_calls_are_removed(tmp_path):
    partial = tmp_path / f"index.{'01' * 16}.partial"
    partial.mkdir()
    others = [tmp_path / f"other.{'01' * 16}.partial", tmp_path / "index.my.partial"]
    for other in others:
        other.mkdir()
    for name in ("difficulty.npy", "examples.npy", "index.json", "old-3.written"):
        (partial / name).write_bytes(os.urandom(10**5))
    with pytest.raises(ValueError, match="is not a difficulty index"):
        jb.schedule.DifficultyIndex(tmp_path / "index")
    index = jb.sort.write_difficulty_index(tmp_path / "index", difficulties(), MESH)
    index.check()
    assert not partial.exists() and all(other.exists() for other in others)
    assert len(list((tmp_path / "index").iterdir())) == 3


def test_an_empty_folder_may_be_used(tmp_path):
    jb.sort.write_difficulty_index(tmp_path, difficulties(), MESH).check()
    with pytest.raises(ValueError, match="is not a difficulty index, because"):
        jb.schedule.DifficultyIndex(tmp_path / "other")


def test_a_run_uses_the_index_that_another_run_finished_first(tmp_path, monkeypatch):
    """Simulates another run that finishes its index during the sort."""
    values, folder = difficulties(), tmp_path / "index"

    def sort_after_writing(other):
        def sort(*args):
            monkeypatch.undo()
            jb.sort.write_difficulty_index(folder, other, MESH)
            return jb.sort.sample_sort(*args)

        return sort

    monkeypatch.setattr(
        "jaxbucket.sort.difficulty.sample_sort", sort_after_writing(values)
    )
    jb.sort.write_difficulty_index(folder, values, MESH).check()
    assert [path.name for path in tmp_path.iterdir()] == ["index"]
    shutil.rmtree(folder)
    sort = sort_after_writing(values + 1)
    monkeypatch.setattr("jaxbucket.sort.difficulty.sample_sort", sort)
    with pytest.raises(ValueError, match="has an index of different difficulties"):
        jb.sort.write_difficulty_index(folder, values, MESH)
    jb.schedule.DifficultyIndex(folder).check()


def test_integers_beyond_float_precision_are_distinguished(tmp_path):
    values = np.array([2**60 + 1, 2**60])
    jb.sort.write_difficulty_index(tmp_path / "index", values, MESH)
    with pytest.raises(ValueError, match="has an index of different difficulties"):
        jb.sort.write_difficulty_index(tmp_path / "index", values[::-1], MESH)
    index = jb.schedule.DifficultyIndex(tmp_path / "index")
    assert index.between(2**60, 2**60 + 1).tolist() == [1]
    assert index.between(-(10**400), 10**400).tolist() == [1, 0]
    with pytest.raises(ValueError, match="`low=nan` is not a number"):
        index.between(float("nan"), 1)


def test_bounds_are_rounded_as_the_difficulties_are(tmp_path):
    values = np.array([i / 10 for i in range(10)], np.float32)
    index = jb.sort.write_difficulty_index(tmp_path / "index", values, MESH)
    for first in range(10):
        for last in range(first, 10):
            between = index.between(first / 10, last / 10)
            assert between.tolist() == list(range(first, last))


def test_files_that_do_not_belong_together_are_refused(folder):
    np.save(folder / "examples.npy", np.arange(SIZE, dtype=np.int32))
    plan = jb.BucketPlan.from_shapes([(4, 8)])

    def build():
        index = jb.schedule.DifficultyIndex(folder)
        order = jb.Curriculum(index, jb.schedule.LinearPacing(start=0.1))
        return jb.BatchSchedule(plan, [8] * SIZE, order=order)[0]

    with pytest.raises(ValueError, match="examples.npy is not sorted. Delete the fold"):
        build()
    np.save(folder / "examples.npy", np.full(SIZE, 10**6, np.int32))
    with pytest.raises(ValueError, match="has examples from 1000000 to 1000000, but"):
        build()


def test_bfloat16_and_big_endian_floats_are_accepted(tmp_path):
    for name, values in (
        ("bfloat16", jnp.asarray([2, 1], jnp.bfloat16)),
        (">f8", np.array([2, 1], ">f8")),
    ):
        index = jb.sort.write_difficulty_index(tmp_path / name, values, MESH)
        assert index.examples.tolist() == [1, 0]


def test_check_detects_ties_out_of_order(tmp_path):
    jb.sort.write_difficulty_index(tmp_path / "index", np.zeros(4), MESH)
    np.save(tmp_path / "index" / "examples.npy", np.array([0, 2, 1, 3], np.int32))
    with pytest.raises(ValueError, match="is not sorted"):
        jb.schedule.DifficultyIndex(tmp_path / "index").check()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "`difficulty` is empty"),
        ([[1.0]], r"`difficulty` is float64\[1, 1\]"),
        (["hard"], r"`difficulty` is <U4\[1\]"),
        ([1.0, float("nan")], r"`difficulty\[1\]=nan` is not finite"),
        ([-float("inf")], r"`difficulty\[0\]=-inf` is not finite"),
        (np.array([2**63], np.uint64), "is too large. Pass numbers up to 2"),
        (np.ma.array([1.0, 2.0], mask=[0, 1]), "`difficulty` is a masked array"),
    ],
)
def test_invalid_difficulties_are_rejected(tmp_path, values, message):
    with pytest.raises(ValueError, match=message):
        jb.sort.write_difficulty_index(tmp_path / "index", values, MESH)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="`sorted_by='size'`: choose"):
        jb.sort.write_difficulty_index(tmp_path / "x", [1.0], MESH, sorted_by="size")


def change(path, offset, content):
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        file.write(content)


def set_fields(folder, **fields):
    description = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps({**description, **fields}))


def save_archive(path):
    with path.open("wb") as file:
        np.savez(file, a=np.arange(3))


DAMAGES = {
    "no json": lambda folder: (folder / "index.json").unlink(),
    "truncated json": lambda folder: os.truncate(folder / "index.json", 9),
    "different json": lambda folder: (folder / "index.json").write_text("[1]"),
    "dtype": lambda folder: set_fields(folder, dtype="junk"),
    "order": lambda folder: set_fields(folder, sorted_by="junk"),
    "unknown field": lambda folder: set_fields(folder, color="red"),
    "archive": lambda folder: save_archive(folder / "examples.npy"),
    "version": lambda folder: (folder / "index.json").write_text('{"version": 9}'),
    "no examples": lambda folder: (folder / "examples.npy").unlink(),
    "truncated examples": lambda folder: os.truncate(folder / "examples.npy", 999),
    "header": lambda folder: change(folder / "examples.npy", 20, b"'('"),
    "truncated header": lambda folder: os.truncate(folder / "difficulty.npy", 20),
    "examples dtype": lambda folder: np.save(folder / "examples.npy", np.arange(SIZE)),
    "fewer": lambda folder: np.save(folder / "difficulty.npy", np.zeros(9, np.float32)),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_files_are_rejected(folder, name):
    DAMAGES[name](folder)
    with pytest.raises(ValueError, match="again|Write one with") as raised:
        jb.schedule.DifficultyIndex(folder)
    assert str(folder) in str(raised.value)


@pytest.mark.parametrize("file", ["difficulty.npy", "examples.npy"])
@pytest.mark.parametrize("seed", range(10))
def test_check_detects_changed_bytes(folder, file, seed):
    rng = np.random.default_rng(seed)
    change(folder / file, -int(rng.integers(8, 4 * SIZE)), rng.bytes(4))
    with pytest.raises(ValueError, match="Delete the folder"):
        jb.schedule.DifficultyIndex(folder).check()


@pytest.mark.parametrize("seed", range(10))
def test_checksums_of_shares_add_up_to_the_checksum_of_all_examples(seed):
    rng = np.random.default_rng(seed)
    values = difficulties()
    ends = np.sort([0, *rng.integers(0, SIZE, 3), SIZE])
    parts = [share_checksum(values[a:b], int(a)) for a, b in zip(ends, ends[1:])]  # noqa: B905
    assert sum(parts) % 2**64 == share_checksum(values, 0)
    assert share_checksum(values[::-1], 0) != share_checksum(values, 0)
    assert share_checksum(values, 1) != share_checksum(values, 0)


def test_a_full_disk_leaves_no_files_behind(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left on device"):
            jb.sort.write_difficulty_index(tmp_path / "index", [1.0, 2.0], MESH)
    assert not list(tmp_path.iterdir())
    jb.sort.write_difficulty_index(tmp_path / "index", [1.0, 2.0], MESH).check()


def test_bounds_are_compared_exactly(tmp_path):
    large = jb.sort.write_difficulty_index(tmp_path / "i", [2**24 + 3, 1], MESH)
    small = jb.sort.write_difficulty_index(tmp_path / "f", [0.1, 0.5], MESH)
    for kind in (float, np.float32, np.float64):
        assert large.between(kind(0), kind(2**24 + 4)).tolist() == [1, 0]
    bound = np.float32(0.1)
    for value in (bound, float(bound)):
        assert small.between(0, value).tolist() == [0]


def test_a_wrong_num_examples_is_rejected(tmp_path):
    with pytest.raises(ValueError, match="2 examples over .* `num_examples=4`"):
        jb.sort.write_difficulty_index(tmp_path / "x", [1.0, 2.0], MESH, num_examples=4)
    jb.sort.write_difficulty_index(tmp_path / "x", [1.0, 2.0], MESH, num_examples=2)


def test_a_wrong_number_of_processes_is_rejected(tmp_path):
    class TwoProcesses:
        index, count = 0, 2

    assert jax.process_count() == 1
    with pytest.raises(ValueError, match="`processes` has 2 of 1 processes"):
        jb.sort.write_difficulty_index(
            tmp_path / "x", [1.0], MESH, processes=TwoProcesses()
        )
