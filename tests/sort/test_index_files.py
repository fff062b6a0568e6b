"""Difficulty indices: compared with numpy, and with damaged files."""

import errno
import os

import jax.numpy as jnp
import numpy as np
import pytest

import jaxbucket as jb

MESH = jb.data_mesh()
SIZE = 1003


def difficulties(dtype=np.float32):
    return (10 * np.random.default_rng(0).random(SIZE)).astype(dtype)


@pytest.fixture(name="folder")
def folder_fixture(tmp_path):
    jb.sort.write_difficulty_index(tmp_path / "index", difficulties(), MESH)
    return tmp_path / "index"


@pytest.mark.parametrize("dtype", ["?", "i1", "u4", "i8", jnp.bfloat16, "f4", ">f8"])
def test_the_index_is_a_stable_argsort(tmp_path, dtype):
    values = difficulties(dtype)
    index = jb.sort.write_difficulty_index(tmp_path / "index", values, MESH)
    assert len(index) == SIZE and index.examples.dtype == np.int32
    np.testing.assert_array_equal(index.examples, np.argsort(values, kind="stable"))
    np.testing.assert_array_equal(index.difficulty, values)
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


def test_a_curriculum_accepts_an_index(folder):
    values, lengths = difficulties(), np.full(SIZE, 8)
    plan = jb.BucketPlan.from_shapes([(10, 8)])
    index = jb.schedule.DifficultyIndex(folder)
    orders = [jb.Curriculum(x, jb.schedule.LinearPacing(0.1)) for x in (values, index)]
    assert str(orders[0]) == str(orders[1])
    one, other = (jb.BatchSchedule(plan, lengths, order=x, seed=1) for x in orders)
    for step in (0, 50, 100):
        np.testing.assert_array_equal(one[step].rows, other[step].rows)
    kept = np.arange(SIZE) % 3 > 0
    by_value = jb.schedule.ByValue(jb.schedule.LinearPacing(), low=0, high=9)
    # Several metrics use the order of the index, too.
    other = np.arange(SIZE) * 7 % 101
    pairs = [jb.Curriculum({"a": x, "b": other}, by_value) for x in (values, index)]
    assert str(pairs[0]) == str(pairs[1])
    for kept_or_none in (None, kept):
        ranks = [pair._metrics[0].ranks(kept_or_none) for pair in pairs]
        for one, two in zip(*ranks, strict=True):
            np.testing.assert_array_equal(one, two)


def test_an_existing_index_is_returned_or_rejected(folder, monkeypatch):
    values = difficulties()
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    monkeypatch.setattr("jaxbucket.sort.index_files.sample_sort", None)
    again = jb.sort.write_difficulty_index(folder, values, MESH)
    assert before == {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    np.testing.assert_array_equal(again.difficulty, values)
    for other in (values + 1, values[:-1], values.astype(float)):
        with pytest.raises(ValueError, match="`folder="):
            jb.sort.write_difficulty_index(folder, other, MESH)


def test_integers_beyond_float_precision_are_distinguished(tmp_path):
    values = np.array([2**60 + 1, 2**60])
    jb.sort.write_difficulty_index(tmp_path / "index", values, MESH)
    with pytest.raises(ValueError, match="`folder="):
        jb.sort.write_difficulty_index(tmp_path / "index", values[::-1], MESH)


def test_files_that_do_not_belong_together_are_refused(folder):
    np.save(folder / "examples.npy", np.arange(SIZE, dtype=np.int32))
    plan = jb.BucketPlan.from_shapes([(4, 8)])

    def build():
        index = jb.schedule.DifficultyIndex(folder)
        order = jb.Curriculum(index, jb.schedule.LinearPacing(start=0.1))
        return jb.BatchSchedule(plan, [8] * SIZE, order=order)[0]

    with pytest.raises(ValueError, match="examples.npy"):
        build()
    for size, value in ((SIZE, 10**6), (SIZE - 1, 0), (SIZE + 1, 0)):
        np.save(folder / "examples.npy", np.full(size, value, np.int32))
        with pytest.raises(ValueError, match="examples.npy"):
            build()


class TwoProcesses:
    index, count = 0, 2


@pytest.mark.parametrize(
    ("values", "options", "name"),
    [
        ([], {}, "difficulty"),
        ([[1.0]], {}, "difficulty"),
        (["hard"], {}, "difficulty"),
        ([1.0, float("nan")], {}, r"difficulty\[1\]=nan"),
        ([-float("inf")], {}, "difficulty"),
        (np.array([2**63], np.uint64), {}, "difficulty"),
        ([1.0], {"num_examples": 4}, "num_examples"),
        ([1.0], {"processes": TwoProcesses()}, "processes"),
    ],
)
def test_invalid_arguments_are_refused(tmp_path, values, options, name):
    with pytest.raises(ValueError, match=f"`{name}"):
        jb.sort.write_difficulty_index(tmp_path / "index", values, MESH, **options)
    assert not list(tmp_path.iterdir())


def test_only_an_empty_or_missing_folder_is_written(tmp_path):
    (tmp_path / "notes.txt").write_text("contents")
    with pytest.raises(ValueError, match="`folder"):
        jb.sort.write_difficulty_index(tmp_path, difficulties(), MESH)
    assert (tmp_path / "notes.txt").read_text() == "contents"
    (tmp_path / "notes.txt").unlink()
    jb.sort.write_difficulty_index(tmp_path, difficulties(), MESH)


def test_drafts_of_killed_calls_are_removed(tmp_path):
    draft = tmp_path / f"index.{'01' * 16}.partial"
    others = [tmp_path / f"other.{'01' * 16}.partial", tmp_path / "index.my.partial"]
    for folder in (draft, *others):
        folder.mkdir()
    with pytest.raises(ValueError, match="is no difficulty index"):
        jb.schedule.DifficultyIndex(tmp_path / "index")
    jb.sort.write_difficulty_index(tmp_path / "index", difficulties(), MESH)
    assert not draft.exists() and all(other.exists() for other in others)


def change_header(folder):
    path = folder / "examples.npy"
    content = path.read_bytes()
    path.write_bytes(content[:20] + b"'('" + content[23:])


DAMAGES = {
    "no examples": lambda folder: (folder / "examples.npy").unlink(),
    "truncated examples": lambda folder: os.truncate(folder / "examples.npy", 999),
    "header": change_header,
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_files_are_rejected(folder, name):
    DAMAGES[name](folder)
    with pytest.raises(ValueError, match="again") as raised:
        jb.schedule.DifficultyIndex(folder)
    assert str(folder) in str(raised.value)


def test_a_full_disk_leaves_no_files_behind(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left on device"):
            jb.sort.write_difficulty_index(tmp_path / "index", [1.0, 2.0], MESH)
    assert not list(tmp_path.iterdir())
    jb.sort.write_difficulty_index(tmp_path / "index", [1.0, 2.0], MESH)
