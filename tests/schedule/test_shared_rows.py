"""Memory maps of lengths: processes of a host share the file of their rows."""

import os
import pickle
import subprocess
import sys
import textwrap
import tracemalloc

import numpy as np
import pytest
from schedule_cases import assert_same_steps

import jaxbucket as jb
from jaxbucket.base import length_counts


@pytest.fixture
def lengths():
    return np.random.default_rng(0).integers(1, 300, 2000)


def mapped(folder, lengths, dtype=np.uint16):
    np.save(folder / "lengths.npy", lengths.astype(dtype))
    return np.load(folder / "lengths.npy", mmap_mode="r")


def files(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("order", ["spread", "source", "ascending", "descending"])
@pytest.mark.parametrize("dtype", ["u2", "u4", "u8", "i4", "i8"])
def test_batches_and_fingerprints_are_those_of_an_array(
    tmp_path, lengths, order, dtype, monkeypatch
):
    monkeypatch.setattr(length_counts, "_CHUNK", 300)
    plan = jb.plan_buckets(lengths, max_tokens=3000, num_buckets=4)
    expected = jb.BatchSchedule(plan, lengths, order=order)
    memory_map = mapped(tmp_path, lengths, dtype)
    for _ in range(2):
        schedule = jb.BatchSchedule(plan, memory_map, order=order)
        assert schedule.fingerprint == expected.fingerprint
        assert schedule.report() == expected.report()
        assert_same_steps(schedule, expected, range(len(expected) + 3))
    name, _ = files(tmp_path)
    assert name.startswith("lengths-") and name.endswith(".rows.npy")


@pytest.mark.parametrize(
    "overlong, max_seq_len", [("truncate", 40), ("drop", 40), ("drop", 66_000)]
)
def test_narrow_lengths_do_not_wrap_around(tmp_path, overlong, max_seq_len):
    lengths = np.array([10, 200, 65_535, 30, 41])
    options = {"overlong": overlong, "max_seq_len": max_seq_len}
    plan = jb.plan_buckets(lengths, max_tokens=70_000, num_buckets=2, **options)
    memory_map = mapped(tmp_path, lengths)
    schedule = jb.BatchSchedule(plan, memory_map, order="source", balance=True)
    expected = jb.BatchSchedule(plan, lengths, order="source", balance=True)
    assert schedule.report() == expected.report()
    assert [x.rows.tolist() for x in schedule] == [x.rows.tolist() for x in expected]


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
@pytest.mark.parametrize(
    "view",
    [slice(None), slice(None, None, -1), slice(7, None), slice(None, None, 3)],
    ids=str,
)
def test_lengths_are_those_of_the_view_and_not_of_the_file(
    tmp_path, lengths, mode, view
):
    np.save(tmp_path / "lengths.npy", np.sort(lengths).astype(np.uint16))
    memory_map = np.load(tmp_path / "lengths.npy", mmap_mode=mode)
    if mode == "c":
        # Only this process sees it.
        memory_map[:] = memory_map[::-1].copy()
    values = memory_map[view]
    expected = np.array(values)
    plan = jb.plan_buckets(expected, max_tokens=3000)
    for copy in (lambda x: x, lambda x: pickle.loads(pickle.dumps(x))):
        found = copy(jb.BatchSchedule(plan, values))
        np.testing.assert_array_equal(found.lengths, expected)
        of_array = jb.BatchSchedule(plan, expected)
        assert_same_steps(found, of_array, range(len(of_array)))


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_no_memory_is_needed_for_each_example(tmp_path, dtype, monkeypatch):
    monkeypatch.setattr(length_counts, "_CHUNK", 1 << 17)
    size = 8_000_000
    lengths = np.random.default_rng(0).integers(1, 300, size, dtype)
    memory_map = mapped(tmp_path, lengths, dtype)
    plan = jb.plan_buckets(lengths, max_tokens=30_000)
    tracemalloc.start()
    schedule = jb.BatchSchedule(plan, memory_map)
    assert schedule.fingerprint and schedule[0] and schedule.report()
    jb.plan_buckets(memory_map, max_tokens=30_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < size


def test_a_file_is_for_its_plan_lengths_order_and_subset(tmp_path, lengths):
    memory_map = mapped(tmp_path, lengths)
    plans = [jb.plan_buckets(lengths, max_tokens=n) for n in (3000, 4000)]
    jb.BatchSchedule(plans[0], memory_map)
    known = {*files(tmp_path)}
    # Neither the seed nor other options change the rows of the buckets.
    jb.BatchSchedule(plans[0], memory_map, seed=3, accumulate=2, order="shuffled")
    assert {*files(tmp_path)} == known
    for plan, values, options in (
        (plans[1], memory_map, {}),
        (plans[0], memory_map, {"order": "ascending"}),
        (plans[0], memory_map, {"subset": np.arange(100)}),
        (plans[0], memory_map[:1000], {}),
    ):
        schedule = jb.BatchSchedule(plan, values, **options)
        assert len(files(tmp_path)) == len(known) + 1
        known = {*files(tmp_path)}
        expected = jb.BatchSchedule(plan, np.array(values), **options)
        assert_same_steps(schedule, expected, range(3))


def test_a_file_that_cannot_be_written_is_not_needed(tmp_path, lengths):
    memory_map = mapped(tmp_path, lengths)
    plan = jb.plan_buckets(lengths, max_tokens=3000)
    jb.BatchSchedule(plan, memory_map)
    (path,) = tmp_path.glob("*.rows.npy")
    path.unlink()
    # A folder in place of the lock, which no process can open.
    lock = path.with_name(f"{path.name}.lock")
    lock.mkdir()
    expected = jb.BatchSchedule(plan, lengths)
    with pytest.warns(UserWarning, match="copy of its own"):
        schedule = jb.BatchSchedule(plan, memory_map)
    np.testing.assert_array_equal(schedule[5].rows, expected[5].rows)
    lock.rmdir()
    jb.BatchSchedule(plan, memory_map)
    # Nothing is opened for writing if the file is there.
    lock.mkdir()
    schedule = jb.BatchSchedule(plan, memory_map)
    np.testing.assert_array_equal(schedule[5].rows, expected[5].rows)


def test_workers_of_a_loader_map_the_files(tmp_path, lengths):
    memory_map = mapped(tmp_path, lengths)
    schedule = jb.BatchSchedule(jb.plan_buckets(lengths, max_tokens=3000), memory_map)
    data = pickle.dumps(schedule)
    assert len(data) < 2 * len(lengths) < len(pickle.dumps(lengths))
    again = pickle.loads(data)
    assert again.fingerprint == schedule.fingerprint
    assert_same_steps(again, schedule, range(len(schedule)))


@pytest.mark.parametrize("damage", [(7, "u4"), (2000, "i8"), None], ids=str)
def test_a_damaged_file_is_named(tmp_path, lengths, damage):
    memory_map = mapped(tmp_path, lengths)
    plan = jb.plan_buckets(lengths, max_tokens=3000)
    jb.BatchSchedule(plan, memory_map)
    (path,) = tmp_path.glob("*.rows.npy")
    if damage is None:
        path.write_bytes(path.read_bytes()[:100])
    else:
        np.save(path, np.zeros(*damage))
    with pytest.raises(ValueError) as error:
        jb.BatchSchedule(plan, memory_map)
    assert path.name in "".join([str(error.value), *error.value.__notes__])
    assert str(path) in "".join(error.value.__notes__)


def test_processes_that_start_together_write_one_file(tmp_path, lengths):
    mapped(tmp_path, lengths)
    program = """
        import sys, time
        import numpy as np, jaxbucket as jb
        from jaxbucket.schedule import epoch_rows
        sort = epoch_rows.sort_by_bucket
        def slow(*args):
            time.sleep(0.5)
            print("writes")
            sort(*args)
        epoch_rows.sort_by_bucket = slow
        lengths = np.load("lengths.npy", mmap_mode="r")
        plan = jb.plan_buckets(lengths, max_tokens=3000)
        print(jb.BatchSchedule(plan, lengths)[7].rows.tolist())
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    options = {"cwd": tmp_path, "stdout": subprocess.PIPE, "text": True}
    runs = [subprocess.Popen(command, **options, env=os.environ) for _ in range(3)]
    outputs = [run.communicate(timeout=120)[0].splitlines() for run in runs]
    assert sorted(map(len, outputs)) == [1, 1, 2]
    assert len({lines[-1] for lines in outputs}) == 1
    assert len(files(tmp_path)) == 2
