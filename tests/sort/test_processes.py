"""Real processes sort together and write a difficulty index."""

import pytest

SORT = """
import jax, jax.numpy as jnp, numpy as np
import jaxbucket as jb

def sort_keys(processes):
    here, count = processes.index, processes.count
    mesh = jb.data_mesh()
    devices = mesh.size
    rng = np.random.default_rng(0)
    size = 60_001
    uniform = rng.integers(-(2**31), 2**31 - 1, size, np.int32)
    floats = rng.standard_normal(size).astype(np.float32)
    lengths = np.minimum(rng.lognormal(5, 1, size), 2048).astype(np.int32)
    cases = {
        "uniform": (uniform,),
        "lengths": (lengths,),
        "mostly equal": (np.where(rng.random(size) < 0.9, 7, uniform),),
        "equal": (np.full(size, 7),),
        "sorted": (np.sort(uniform),),
        "reversed": (np.sort(uniform)[::-1],),
        "nan": (np.where(rng.random(size) < 0.3, np.float32(np.nan), floats),),
        "wide": (rng.integers(-(2**62), 2**62, size),),
        "columns": (lengths, floats, uniform),
    }

    def shared_unevenly(column, seed):
        # Some processes have no keys.
        inner = np.random.default_rng(seed).integers(0, size, count - 1)
        ends = np.sort([0, 0 if count < 4 else size, *inner, size])[-count - 1 :]
        ends[0] = 0
        return column[ends[here] : ends[here + 1]]

    def check(shares, want):
        for share in shares:
            np.testing.assert_array_equal(share.index, want[list(share.ranks)])
            assert len(share.ranks) - len(want) // devices in (0, 1)

    for seed, (name, columns) in enumerate(cases.items()):
        want = np.lexsort(columns[::-1])
        local = tuple(shared_unevenly(column, seed) for column in columns)
        for assignment in ("contiguous", "interleaved"):
            check(jb.sort.sample_sort(local, mesh, assignment=assignment), want)
    record("sorted")

    # Invalid keys or options of one process raise errors in all processes.
    for make_keys in (
        lambda: np.zeros((2, 2)) if here == 1 else np.zeros(4),
        lambda: np.zeros(4, np.float32 if here == 1 else np.float64),
        lambda: np.zeros(0),
    ):
        try:
            jb.sort.sample_sort(make_keys(), mesh)
        except ValueError as error:
            record(error)
    for options in ({"assignment": "x"}, {"descending": None}, {"descending": True}):
        try:
            jb.sort.sample_sort(uniform, mesh, **(options if here == 1 else {}))
        except ValueError as error:
            record(error)
    deleted = jnp.zeros(3)
    if here == 1:
        deleted.delete()
    try:
        jb.sort.sample_sort(deleted, mesh)
    except (RuntimeError, ValueError) as error:
        record(error)
"""
INDEX = """
import os, pathlib, signal
import jax
import numpy as np
import jaxbucket as jb
import jaxbucket.sort.index_files as index_files

SIZE = 10_007
folder = pathlib.Path(sys.argv[0]).parent
values = np.random.default_rng(0).integers(0, 50, SIZE)
calls = [0]

class Source:
    fingerprint = "source"
    def __len__(self):
        return SIZE
    def __getitem__(self, index):
        if not 0 <= index < SIZE:
            raise IndexError(index)
        return index

def measure(index):
    calls[0] += 1
    return float(values[index])

def write_indices(processes):
    here, count = processes.index, processes.count
    if (folder / "fault").exists() and here == 1:
        written = index_files._write_part
        def fatal(path, *args):
            written(path, *args)
            if path.name == "examples.npy":
                (folder / "fault").unlink()
                os.kill(os.getpid(), signal.SIGKILL)
        index_files._write_part = fatal
    share = jb.data.measure_difficulty(
        Source(), measure, cache=folder / "cache", cache_key="values",
        processes=processes, progress=False,
    )
    # With ranks within each share, every process has its own order.
    local_ranks = np.argsort(np.argsort(share, kind="stable"))
    for by, keys in (("all", share), ("process", local_ranks)):
        index = jb.sort.write_difficulty_index(
            folder / by, keys, jb.data_mesh(), processes=processes
        )
    ends = [SIZE * i // count for i in range(count + 1)]
    parts = [np.argsort(values[a:b], kind="stable") for a, b in zip(ends, ends[1:])]
    local = np.concatenate([np.arange(len(part)) for part in parts])
    order = np.concatenate([a + part for a, part in zip(ends, parts)])
    by_process = order[np.argsort(local, kind="stable")]
    every = jb.schedule.DifficultyIndex(folder / "all")
    np.testing.assert_array_equal(every.examples, np.argsort(values, kind="stable"))
    np.testing.assert_array_equal(index.examples, by_process)
    record(calls[0])
    # Every process passes all difficulties, or those of another process.
    for where, keys in (("new", values), ("all", share + 1)):
        try:
            jb.sort.write_difficulty_index(
                folder / where, keys, jb.data_mesh(), processes=processes,
                num_examples=SIZE,
            )
        except ValueError as error:
            record(error)
    # A different folder in each process, and a mesh of local devices.
    for where, mesh in (
        (folder / str(here) / "unshared", jb.data_mesh()),
        (folder / "local", jb.data_mesh(jax.local_devices())),
    ):
        where.parent.mkdir(exist_ok=True)
        try:
            jb.sort.write_difficulty_index(where, share, mesh, processes=processes)
        except ValueError as error:
            record(error)
        assert not where.exists() and not list(where.parent.glob("*.partial"))
    # Devices in different orders, and different sources.
    mesh = jb.data_mesh(jax.devices()[:: 1 if here else -1])
    for fail in (
        lambda: jb.sort.write_difficulty_index(
            folder / "mesh", share, mesh, processes=processes
        ),
        lambda: jb.data.measure_difficulty(
            [5] * (9 + here), float, processes=processes, progress=False
        ),
    ):
        try:
            fail()
        except ValueError as error:
            record(error)
    # Invalid difficulties of one process raise errors in all processes.
    wrong_shape = share if here else share[:, None]
    wrong_dtype = share.astype(np.float32) if here else share
    for wrong in (wrong_shape, wrong_dtype):
        try:
            jb.sort.write_difficulty_index(
                folder / "wrong", wrong, jb.data_mesh(), processes=processes
            )
        except ValueError as error:
            record(error)
"""
SORT_AND_INDEX = f"""{SORT}{INDEX}
with jb.Processes() as processes:
    sort_keys(processes)
    write_indices(processes)
"""


@pytest.mark.parametrize(
    ("count", "devices"),
    [(2, 2), pytest.param(4, 1, marks=pytest.mark.exhaustive)],
)
def test_processes_sort_together_and_write_one_index(launch, tmp_path, count, devices):
    run = launch(SORT_AND_INDEX, count=count, devices=devices)
    assert run.status == 0, run.output
    for index in range(count):
        lines = run.recorded(index)
        check_sorted(index, lines[:8])
        check_written(index, lines[8:])
    assert not (tmp_path / "wrong").exists()


def check_sorted(index, lines):
    done, shape, dtype, empty, *others = lines
    assert len(others) == 4
    assert done == "sorted"
    if index == 1:
        assert "`keys` is float64[2, 2]" in shape
        assert "float32 ascending, contiguous) are of a different kind" in dtype
    else:
        assert shape == "The `keys` of process 1 are invalid. See its error."
        assert "float64 ascending, contiguous) are of a different kind" in dtype
    assert "empty in every process" in empty


def check_written(index, lines):
    _, whole, others, unshared, local, order, source, shape, dtype = lines
    assert "`num_examples=10007`" in whole
    assert "`mesh` is of a different kind" in order
    assert "`source`" in source and "differ in the processes" in source
    assert "Pass a folder that all processes share" in unshared
    assert "`mesh` is of a different kind" in local
    assert "has an index of different difficulties" in others
    assert "`difficulty` is float64[" in shape
    assert shape.startswith("Process 0 failed: ") == (index > 0)
    assert "Pass the same dtype" in dtype


@pytest.mark.exhaustive
def test_the_run_after_a_killed_process_writes_the_index(launch, tmp_path):
    processes = "with jb.Processes(timeout=4) as processes:"
    code = f"{INDEX}\n{processes}\n    write_indices(processes)"
    (tmp_path / "fault").touch()
    run = launch(code, count=3)
    assert run.status != 0
    # The partial index is not visible under its final name.
    assert not (tmp_path / "all").exists()
    run = launch(code, count=3)
    assert run.status == 0, run.output
    assert [int(run.recorded(index)[0]) for index in range(3)] == [0] * 3
    assert not list(tmp_path.glob("*.partial"))


MEMORY = """
import re
import numpy as np
import jaxbucket as jb

def peak():
    text = open("/proc/self/status").read()
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", text)[1])

def reset():
    open("/proc/self/clear_refs", "w").write("5")

with jb.Processes() as processes:
    here, count = processes.index, processes.count
    mesh = jb.data_mesh()
    size = 2**23
    rng = np.random.default_rng(0)
    # The first sort loads and compiles code, which must not be measured.
    jb.sort.sample_sort(rng.integers(0, 99, size, np.int32), mesh)
    share = size // count * 8
    spread = rng.integers(0, 2**31 - 1, size // count, np.int32)
    rising = np.arange(size // count, dtype=np.int32) + here * (size // count)
    for name, keys in {
        "uniform": spread,
        "sorted": rising,
        "reversed": size - rising,
        "equal": np.zeros_like(spread),
    }.items():
        for assignment in ("contiguous", "interleaved"):
            reset()
            before = peak()
            jb.sort.sample_sort(keys, mesh, assignment=assignment)
            record(f"{name},{assignment}", (peak() - before) / share)
"""


@pytest.mark.exhaustive
def test_sorting_needs_at_most_three_shares_of_memory(launch, monkeypatch):
    # Freed memory is returned to the system, so that it cannot hide the usage.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    run = launch(MEMORY, count=2)
    assert run.status == 0, run.output
    for index in range(2):
        shares = {line.split()[0]: line.split()[1] for line in run.recorded(index)}
        assert len(shares) == 8
        assert max(map(float, shares.values())) <= 3, shares
