"""Measuring lengths: in workers, in several processes, cached and resumed."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from jaxbucket import measure_lengths
from jaxbucket.data import measure_difficulty
from jaxbucket.data.lengths import parallel_pass

SIZE = 5000


@pytest.mark.parametrize("path", ["x.csv", b"x.csv", pathlib.Path("x.csv")])
def test_a_path_is_refused(path):
    message = (
        r"`source` is a path, 'x.csv'\. .* `jaxbucket measure x.csv -o lengths.npy`"
    )
    with pytest.raises(ValueError, match=message):
        measure_lengths(path)


class Source:
    """Examples whose lengths follow a formula. Counts the reads."""

    fingerprint = "v1"

    def __init__(self, size: int = SIZE):
        self.size = size
        self.reads = 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        self.reads += 1
        return {"x": np.zeros(length_of(index))}


def length_of(index: int) -> int:
    return 1 + index * 7919 % 50


LENGTHS = np.array([length_of(index) for index in range(SIZE)])


def measured(source, **options) -> np.ndarray:
    return measure_lengths(source, progress=False, **options)


def test_lengths_are_int32_in_the_order_of_the_source():
    source = Source()
    lengths = measure_lengths(source)
    assert lengths.dtype == np.int32
    np.testing.assert_array_equal(lengths, LENGTHS)
    assert source.reads == SIZE


def test_lengths_may_be_measured_by_a_function():
    assert measure_lengths(["ab", "c"], length_fn=len).tolist() == [2, 1]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], "`source` is empty. Pass a source with at least"),
        ([{"x": [1]}, {"x": []}], "`source[1]`: The example has length 0 in 'x'"),
        ([{"x": 1}], "`source[0]`: The example has no sequence feature among ['x']"),
        ([{"x": [1]}, [1]], "`source[1]`: The example is a list, not a dict of arr"),
        ([{"x": [1], "y": [1, 2]}], "`source[0]`: The example has sequences of differ"),
    ],
)
def test_examples_without_a_length_are_refused(source, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        measure_lengths(source, progress=False)


def test_only_the_named_sequences_are_measured():
    source = [{"x": [1, 2], "notes": [1, 2, 3]}, {"x": [1], "notes": []}]
    lengths = measure_lengths(source, sequences=["x"], progress=False)
    np.testing.assert_array_equal(lengths, [2, 1])


@pytest.mark.parametrize("length", [0, -2, 2.5, float("nan"), None, "3", 2**31])
def test_invalid_results_of_a_length_function_are_refused(length):
    with pytest.raises(
        ValueError, match=re.escape(f"`source[0]` has length {length!r}")
    ):
        measure_lengths([1], length_fn=lambda example: length, progress=False)


@pytest.mark.parametrize(
    "num_workers",
    [
        *(0, 2),
        pytest.param(1, marks=pytest.mark.exhaustive),
        pytest.param(3, marks=pytest.mark.exhaustive),
    ],
)
def test_any_number_of_workers_returns_the_same_lengths(tmp_path, num_workers):
    for cache in (None, tmp_path / "cache"):
        lengths = measured(Source(), num_workers=num_workers, cache=cache)
        assert lengths.dtype == np.int32
        np.testing.assert_array_equal(lengths, LENGTHS)


def test_a_lambda_can_be_sent_to_workers():
    lengths = measured([3, 1, 2], length_fn=lambda n: n + 1, num_workers=1)
    assert lengths.tolist() == [4, 2, 3]


def test_cached_lengths_are_read_from_the_file(tmp_path):
    source = Source()
    first = measured(source, cache=tmp_path)
    reads = source.reads
    again = measured(source, cache=tmp_path)
    # Only the sample of examples is read, to identify the source.
    assert source.reads - reads < 20
    np.testing.assert_array_equal(again, first)
    assert not again.flags.writeable
    (file,) = tmp_path.iterdir()
    assert file.suffix == ".npy"


def test_each_source_and_key_has_its_own_file(tmp_path):
    other = Source()
    other.fingerprint = "v2"
    other_key = {"cache_key": "1 + a"}
    measured(Source(), cache=tmp_path)
    for number, options in enumerate(
        [
            {"source": other},
            {"source": Source(SIZE - 1)},
            {"source": Source(), "length_fn": lambda x: len(x["x"]), "cache_key": "a"},
            {"source": Source(), "length_fn": lambda x: 1 + len(x["x"]), **other_key},
            {"source": Source(), "sequences": ["x"]},
            {"source": Source(), "cache_key": "b"},
        ],
        2,
    ):
        source = options.pop("source")
        lengths = measured(source, cache=tmp_path, **options)
        assert lengths[0] == length_of(0) + (number == 5)
        assert len(list(tmp_path.iterdir())) == number


def test_an_interrupted_pass_is_resumed(tmp_path):
    class Failing(Source):
        def __getitem__(self, index):
            if index == self.last:
                raise KeyboardInterrupt
            return super().__getitem__(index)

    source = Failing()
    # In the middle of the source, after several complete chunks.
    source.last = 3001
    with pytest.raises(KeyboardInterrupt):
        measured(source, cache=tmp_path)
    (partial,) = tmp_path.iterdir()
    assert partial.suffix == ".partial"
    source.last, source.reads = -1, 0
    np.testing.assert_array_equal(measured(source, cache=tmp_path), LENGTHS)
    assert source.reads < SIZE - 3001 + parallel_pass._CHUNK + 20
    assert [path.suffix for path in tmp_path.iterdir()] == [".npy"]


@pytest.mark.parametrize("damage", ["truncated", "empty", "foreign", "zeros"])
def test_a_damaged_cache_file_is_refused(tmp_path, damage):
    measured(Source(), cache=tmp_path)
    (file,) = tmp_path.iterdir()
    if damage == "truncated":
        os.truncate(file, file.stat().st_size - 4)
    elif damage == "empty":
        file.write_bytes(b"")
    elif damage == "foreign":
        np.save(file, np.ones(7))
    else:
        np.save(file, np.zeros(SIZE, np.int32))
    with pytest.raises(ValueError, match=rf"{file.name} .* Delete the file to measu"):
        measured(Source(), cache=tmp_path)


@pytest.mark.parametrize("damage", ["truncated", "foreign"])
def test_a_damaged_partial_file_is_started_again(tmp_path, damage):
    measured(Source(), cache=tmp_path)
    (file,) = tmp_path.iterdir()
    partial = file.with_suffix(".partial")
    file.rename(partial)
    if damage == "truncated":
        os.truncate(partial, 100)
    else:
        partial.write_bytes(b"x" * 1000)
    np.testing.assert_array_equal(measured(Source(), cache=tmp_path), LENGTHS)


def test_workers_name_an_example_without_a_length():
    with pytest.raises(ValueError, match=r"`source\[1\]`: The example has length 0"):
        measured([{"x": [1]}, {"x": []}], num_workers=1)


def test_an_example_that_cannot_be_read_is_named():
    def length_fn(example):
        raise OSError("disk")

    with pytest.raises(ValueError, match=r"`source\[0\]` cannot be measured: OSError"):
        measured([1, 2], length_fn=length_fn)


def test_invalid_options_are_refused():
    with pytest.raises(ValueError, match="`num_workers=-1` must not be negative"):
        measured([{"x": [1]}], num_workers=-1)

    class Two:
        index, count = 0, 2

    with pytest.raises(ValueError, match="`processes` requires `cache`"):
        measured([{"x": [1]}], processes=Two())


SCRIPT = """
import os, sys, time
import numpy as np
import jaxbucket as jb

class Source:
    def __len__(self):
        return 5000
    def __getitem__(self, index):
        time.sleep(0.001)
        if index == 2500 and sys.argv[2:] == ["lost"]:
            os.kill(os.getpid(), 9)
        return {"x": np.zeros(1 + index * 7919 % 50)}

if __name__ == "__main__":
    lengths = jb.measure_lengths(
        Source(), num_workers=2, cache=sys.argv[1], progress=False
    )
    print(int(lengths.sum()))
"""


def start(tmp_path: pathlib.Path, *args: str) -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, script, tmp_path / "cache", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.exhaustive
def test_a_pass_is_resumed_after_a_worker_or_the_parent_is_killed(tmp_path):
    cache = tmp_path / "cache"
    with start(tmp_path, "lost") as run:
        _, error = run.communicate(timeout=200)
    assert run.returncode == 1
    assert "WorkerDied: A worker process died" in error
    (partial,) = cache.iterdir()
    before = np.load(partial)
    assert np.all((before == LENGTHS) | (before == 0)) and before.any()
    with start(tmp_path) as run:
        deadline = time.monotonic() + 200
        while np.count_nonzero(np.load(partial)) == np.count_nonzero(before):
            assert time.monotonic() < deadline and run.poll() is None
            time.sleep(0.02)
        run.send_signal(signal.SIGKILL)
        run.communicate()
    assert not list(cache.glob("*.npy"))
    with start(tmp_path) as run:
        out, error = run.communicate(timeout=200)
    assert out == f"{LENGTHS.sum()}\n", error


@pytest.mark.exhaustive
def test_each_process_measures_a_share(launch, tmp_path):
    code = f"""
import numpy as np
import jaxbucket as jb

class Source:
    reads = 0
    def __len__(self):
        return {SIZE}
    def __getitem__(self, index):
        self.reads += 1
        return {{"x": np.zeros(1 + index * 7919 % 50)}}

with jb.Processes(timeout=10) as processes:
    for attempt in range(2):
        source = Source()
        lengths = jb.measure_lengths(
            source, cache={str(tmp_path / "cache")!r}, processes=processes,
            progress=False,
        )
        record(int(lengths.sum()), source.reads < {SIZE} / 3 + 20 - 1600 * attempt)
"""
    run = launch(code, count=3)
    assert run.status == 0, run.output
    for index in range(3):
        assert run.recorded(index) == [f"{LENGTHS.sum()} True"] * 2
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".npy"]


class Absent(list):
    """A source that cannot be unpickled."""

    def __reduce__(self):
        return _fail_to_open, ()


def _fail_to_open():
    raise FileNotFoundError("no shard here")


def test_a_source_that_a_worker_cannot_open_is_refused():
    source = Absent([{"x": [1]}])
    message = "`source` cannot be opened in a worker: FileNotFoundError: no shard here"
    with pytest.raises(ValueError, match=message):
        measure_lengths(source, num_workers=1, progress=False)


def test_a_source_that_cannot_be_pickled_is_refused():
    source = [{"x": [1], "handle": threading.Lock()}]
    with pytest.raises(ValueError, match="cannot be sent to a worker: .*num_workers=0"):
        measure_lengths(source, num_workers=1, progress=False)


def test_a_partly_measured_chunk_is_completed(tmp_path):
    # The state after a process was killed while it wrote a chunk.
    source = [{"x": [0] * n} for n in (3, 1, 4, 2)]
    measure_lengths(source, cache=tmp_path, progress=False)
    (path,) = tmp_path.iterdir()
    half = np.load(path)
    half[1] = 0
    np.save(path.with_suffix(".partial.npy"), half)
    path.unlink()
    path.with_suffix(".partial.npy").rename(path.with_suffix(".partial"))
    lengths = measure_lengths(source, cache=tmp_path, progress=False)
    assert lengths.tolist() == [3, 1, 4, 2]
    assert [x.name for x in tmp_path.iterdir()] == [path.name]


def test_a_cache_that_is_not_a_folder_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(ValueError, match="`cache='.*file'` is not a writable folder"):
        measure_lengths([{"x": [1]}], cache=path, progress=False)
    assert path.read_text() == "mine"


def test_a_cache_file_with_several_arrays_is_refused(tmp_path):
    source = [{"x": [1]}]
    measure_lengths(source, cache=tmp_path, progress=False)
    (path,) = tmp_path.iterdir()
    with path.open("wb") as file:
        np.savez(file, a=np.ones(1), b=np.ones(1))
    with pytest.raises(ValueError, match="cannot be read: the magic.* Delete the file"):
        measure_lengths(source, cache=tmp_path, progress=False)


def test_caching_the_results_of_a_function_requires_a_key(tmp_path):
    message = 'Pass a name for the function, such as `cache_key="length_fn-1"`'
    with pytest.raises(ValueError, match=re.escape(message)):
        measured(["ab"], length_fn=len, cache=tmp_path)
    with pytest.raises(ValueError, match="changes of `difficulty_fn`"):
        measure_difficulty(["ab"], len, cache=tmp_path)
    for cache_key in ("", 1, b"len"):
        with pytest.raises(ValueError, match="must be a non-empty string"):
            measured(["ab"], length_fn=len, cache=tmp_path, cache_key=cache_key)
    assert not list(tmp_path.iterdir())
    # The key identifies the function, whose code is not compared.
    for length_fn in (len, hash):
        lengths = measured(["ab"], length_fn=length_fn, cache=tmp_path, cache_key="1")
        assert lengths.tolist() == [2]


def test_a_function_and_the_default_have_different_files(tmp_path):
    source = [{"x": [0] * n} for n in (3, 1, 4)]

    def measured(cache_key, length_fn=None):
        return measure_lengths(
            source,
            length_fn=length_fn,
            cache=tmp_path,
            cache_key=cache_key,
            progress=False,
        ).tolist()

    for _ in range(2):
        assert measured("1") == measured(None) == [3, 1, 4]
        assert measured("1", lambda example: 9) == [9, 9, 9]
        assert measured("None", lambda example: 8) == [8, 8, 8]
    assert len(list(tmp_path.glob("lengths-*.npy"))) == 4


def test_the_file_name_of_the_default_is_stable(tmp_path):
    source = [{"x": [0] * n} for n in (3, 1, 4)]
    measure_lengths(source, cache=tmp_path, progress=False)
    (path,) = tmp_path.glob("lengths-*.npy")
    assert path.name == "lengths-ac1f9cb8d1aa5d0b61e699e0e7a314b0.npy"


def test_a_bool_is_not_a_length():
    with pytest.raises(ValueError, match="has length True, which is not an integer"):
        measure_lengths([{"x": [1]}], length_fn=lambda x: True, progress=False)


def batches_of_one(dtype=np.int32, shape=()):
    return [{"x": np.zeros((1, n, *shape), dtype), "y": np.int32(1)} for n in (4, 9, 2)]


NESTED = {
    "tokens": (batches_of_one(), {}),
    "frames": (batches_of_one(np.float32, (80,)), {"sequences": ["x"]}),
    "lists": ([{"x": [[1, 2]]}, {"x": [[3]]}], {}),
    "two features": ([x | {"z": x["x"]} for x in batches_of_one()], {}),
    "two sequences": (
        [{"a": x["x"], "b": [1, 2]} for x in batches_of_one()],
        {"sequences": {"a": ["a"], "b": ["b"]}},
    ),
}


@pytest.mark.parametrize("case", NESTED)
def test_arrays_with_an_axis_too_many_are_refused(tmp_path, case):
    source, options = NESTED[case]
    message = r"All lengths are 1, because feature '[xa]' .* \[1, [24].*`length_fn`"
    for more in ({}, {"cache": tmp_path}, {"cache": tmp_path}):
        with pytest.raises(ValueError, match=message):
            measured(source, **options, **more)


@pytest.mark.parametrize(
    "entry",
    [{"role": "user"}, [1, {"a": 2}], ({"a": 1}, 2), np.arange(3)],
    ids=["dict", "list", "tu", "array"],
)
@pytest.mark.parametrize("sequences", [None, ["x"], {"x": ["x"], "y": ["y"]}])
def test_features_of_lists_of_objects_are_refused(entry, sequences):
    array = np.empty(2, object)
    array[:] = [None, entry]
    source = [{"x": array, "y": [1, 2]}]
    with pytest.raises(ValueError, match="'x' is a list of.*`sequences=.*length_fn"):
        measured(source, sequences=sequences)
    functions = {"x": lambda example: 5, "y": lambda example: 2}
    lengths = measured(source, length_fn=functions)
    assert lengths["x"].tolist() == [5]


def test_a_single_frame_is_no_batch():
    source = [{"x": np.zeros((n, 80)), "y": [""] * n} for n in (1, 3)]
    assert measured(source).tolist() == [1, 3]
    assert measured(source[:1], length_fn=lambda x: len(x["x"])).tolist() == [1]
    images = [{"x": np.zeros((1, n, 3))} for n in (4, 9)]
    sequences = {"h": ["x"], "w": ["x"]}
    assert measured(images, sequences=sequences)["w"].tolist() == [4, 9]
    assert measured([{"x": [7]}, {"x": ["word"]}]).tolist() == [1, 1]
