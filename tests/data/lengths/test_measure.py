"""Lengths in one pass: in workers, over processes, kept, and gone on with."""

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


class Source:
    """Examples that are known by their length; counts how often it is read."""

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
    found = measure_lengths(source)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, LENGTHS)
    # In one pass.
    assert source.reads == SIZE


def test_lengths_may_be_measured_by_a_function():
    assert measure_lengths(["ab", "c"], length_fn=len).tolist() == [2, 1]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], "`source` is empty: there is no example to measure"),
        ([{"x": [1]}, {"x": []}], "`source[1]`: The example has length 0. Leave empty"),
        ([{"x": 1}], "`source[0]`: The example ['x'] has no sequence"),
        ([{"x": [1]}, [1]], "`source[1]`: The example is a list, not a dict of arr"),
        ([{"x": [1], "y": [1, 2]}], "`source[0]`: The example has sequences of differ"),
    ],
)
def test_examples_without_a_length_are_refused(source, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        measure_lengths(source, progress=False)


def test_lengths_are_those_of_the_sequences_named():
    source = [{"x": [1, 2], "notes": [1, 2, 3]}, {"x": [1], "notes": []}]
    lengths = measure_lengths(source, sequences=["x"], progress=False)
    np.testing.assert_array_equal(lengths, [2, 1])


@pytest.mark.parametrize("length", [0, -2, 2.5, float("nan"), None, "3", 2**31])
def test_a_function_that_measures_nonsense_is_refused(length):
    with pytest.raises(
        ValueError, match=re.escape(f"`source[0]` has length {length!r}")
    ):
        measure_lengths([1], length_fn=lambda example: length, progress=False)


# What does not fit together


@pytest.mark.parametrize(
    "num_workers",
    [
        *(0, 2),
        pytest.param(1, marks=pytest.mark.exhaustive),
        pytest.param(3, marks=pytest.mark.exhaustive),
    ],
)
def test_any_number_of_workers_finds_the_same(tmp_path, num_workers):
    for cache in (None, tmp_path / "cache"):
        found = measured(Source(), num_workers=num_workers, cache=cache)
        assert found.dtype == np.int32
        np.testing.assert_array_equal(found, LENGTHS)


def test_functions_of_a_test_can_be_sent_to_workers():
    found = measured([3, 1, 2], length_fn=lambda n: n + 1, num_workers=1)
    assert found.tolist() == [4, 2, 3]


def test_what_was_measured_is_read_again(tmp_path):
    source = Source()
    first = measured(source, cache=tmp_path)
    reads = source.reads
    again = measured(source, cache=tmp_path)
    # Some examples stand for all.
    assert source.reads - reads < 20
    np.testing.assert_array_equal(again, first)
    assert not again.flags.writeable
    (file,) = tmp_path.iterdir()
    assert file.suffix == ".npy"


def test_another_source_or_key_has_another_file(tmp_path):
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
        found = measured(source, cache=tmp_path, **options)
        assert found[0] == length_of(0) + (number == 5)
        assert len(list(tmp_path.iterdir())) == number


def test_a_pass_that_was_cut_off_is_gone_on_with(tmp_path):
    class Failing(Source):
        def __getitem__(self, index):
            if index == self.last:
                raise KeyboardInterrupt
            return super().__getitem__(index)

    source = Failing()
    # Behind those that stand for all.
    source.last = 3001
    with pytest.raises(KeyboardInterrupt):
        measured(source, cache=tmp_path)
    (partial,) = tmp_path.iterdir()
    assert partial.suffix == ".partial"
    source.last, source.reads = -1, 0
    np.testing.assert_array_equal(measured(source, cache=tmp_path), LENGTHS)
    assert source.reads < SIZE - 3001 + parallel_pass._CHUNK + 20
    assert [path.suffix for path in tmp_path.iterdir()] == [".npy"]


@pytest.mark.parametrize("spoil", ["cut", "empty", "foreign", "zeros"])
def test_a_file_that_is_cut_or_foreign_is_refused(tmp_path, spoil):
    measured(Source(), cache=tmp_path)
    (file,) = tmp_path.iterdir()
    if spoil == "cut":
        os.truncate(file, file.stat().st_size - 4)
    elif spoil == "empty":
        file.write_bytes(b"")
    elif spoil == "foreign":
        np.save(file, np.ones(7))
    else:
        np.save(file, np.zeros(SIZE, np.int32))
    with pytest.raises(ValueError, match=rf"{file.name} .* Delete the file, to measu"):
        measured(Source(), cache=tmp_path)


@pytest.mark.parametrize("spoil", ["cut", "foreign"])
def test_a_partial_file_that_is_spoiled_is_begun_again(tmp_path, spoil):
    measured(Source(), cache=tmp_path)
    (file,) = tmp_path.iterdir()
    partial = file.with_suffix(".partial")
    file.rename(partial)
    if spoil == "cut":
        os.truncate(partial, 100)
    else:
        partial.write_bytes(b"x" * 1000)
    np.testing.assert_array_equal(measured(Source(), cache=tmp_path), LENGTHS)


def test_an_example_without_a_length_is_named_by_workers_too():
    with pytest.raises(ValueError, match=r"`source\[1\]`: The example has length 0"):
        measured([{"x": [1]}, {"x": []}], num_workers=1)


def test_an_example_that_cannot_be_read_is_named():
    def length_fn(example):
        raise OSError("disk")

    with pytest.raises(ValueError, match=r"`source\[0\]` cannot be measured: OSError"):
        measured([1, 2], length_fn=length_fn)


def test_options_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="`num_workers=-1` must not be negative"):
        measured([{"x": [1]}], num_workers=-1)

    class Two:
        index, count = 0, 2

    with pytest.raises(ValueError, match="pass `cache`, a folder that all of them"):
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
    found = jb.measure_lengths(
        Source(), num_workers=2, cache=sys.argv[1], progress=False
    )
    print(int(found.sum()))
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


def test_a_pass_that_is_lost_or_killed_is_gone_on_with(tmp_path):
    cache = tmp_path / "cache"
    with start(tmp_path, "lost") as run:
        _, error = run.communicate(timeout=200)
    assert run.returncode == 1
    assert "RuntimeError: A worker that measured was lost" in error
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


def test_processes_measure_a_part_each(launch, tmp_path):
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
    for time in range(2):
        source = Source()
        found = jb.measure_lengths(
            source, cache={str(tmp_path / "cache")!r}, processes=processes,
            progress=False,
        )
        say(int(found.sum()), source.reads < {SIZE} / 3 + 20 - 1600 * time)
"""
    run = launch(code, count=3)
    assert run.status == 0, run.output
    for index in range(3):
        assert run.said(index) == [f"{LENGTHS.sum()} True"] * 2
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".npy"]


class Absent(list):
    """A source that no other process can open."""

    def __reduce__(self):
        return _open, ()


def _open():
    raise FileNotFoundError("no shard here")


def test_a_source_that_a_worker_cannot_open_is_told():
    source = Absent([{"x": [1]}])
    words = "`source` cannot be opened in a worker: FileNotFoundError: no shard here"
    with pytest.raises(ValueError, match=words):
        measure_lengths(source, num_workers=1, progress=False)


def test_a_source_that_cannot_be_sent_is_told():
    source = [{"x": [1], "handle": threading.Lock()}]
    with pytest.raises(ValueError, match="cannot be sent to a worker: .*num_workers=0"):
        measure_lengths(source, num_workers=1, progress=False)


def test_a_part_of_a_span_that_is_missing_is_measured(tmp_path):
    # As after a kill in the middle of writing one.
    source = [{"x": [0] * n} for n in (3, 1, 4, 2)]
    measure_lengths(source, cache=tmp_path, progress=False)
    (path,) = tmp_path.iterdir()
    half = np.load(path)
    half[1] = 0
    np.save(path.with_suffix(".partial.npy"), half)
    path.unlink()
    path.with_suffix(".partial.npy").rename(path.with_suffix(".partial"))
    found = measure_lengths(source, cache=tmp_path, progress=False)
    assert found.tolist() == [3, 1, 4, 2]
    assert [x.name for x in tmp_path.iterdir()] == [path.name]


def test_a_cache_that_is_no_folder_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(
        ValueError, match="`cache='.*file'` is not a folder that can be"
    ):
        measure_lengths([{"x": [1]}], cache=path, progress=False)
    assert path.read_text() == "mine"


def test_a_cache_of_several_arrays_is_refused(tmp_path):
    source = [{"x": [1]}]
    measure_lengths(source, cache=tmp_path, progress=False)
    (path,) = tmp_path.iterdir()
    with path.open("wb") as file:
        np.savez(file, a=np.ones(1), b=np.ones(1))
    with pytest.raises(ValueError, match="cannot be read: the magic.* Delete the file"):
        measure_lengths(source, cache=tmp_path, progress=False)


def test_a_function_whose_lengths_are_kept_needs_a_name(tmp_path):
    words = '`length_fn` does: name it by `cache_key`, such as `cache_key="length_fn-'
    with pytest.raises(ValueError, match=re.escape(words)):
        measured(["ab"], length_fn=len, cache=tmp_path)
    with pytest.raises(ValueError, match="`difficulty_fn` does: name it by `cache_k"):
        measure_difficulty(["ab"], len, cache=tmp_path)
    for cache_key in ("", 1, b"len"):
        with pytest.raises(ValueError, match="must be a string that is not empty"):
            measured(["ab"], length_fn=len, cache=tmp_path, cache_key=cache_key)
    assert not list(tmp_path.iterdir())
    # The key is the name: what the function does is not looked into.
    for length_fn in (len, hash):
        found = measured(["ab"], length_fn=length_fn, cache=tmp_path, cache_key="1")
        assert found.tolist() == [2]


def test_a_function_and_the_default_have_files_of_their_own(tmp_path):
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


def test_the_file_of_the_default_has_the_name_that_it_always_had(tmp_path):
    source = [{"x": [0] * n} for n in (3, 1, 4)]
    measure_lengths(source, cache=tmp_path, progress=False)
    (path,) = tmp_path.glob("lengths-*.npy")
    assert path.name == "lengths-ac1f9cb8d1aa5d0b61e699e0e7a314b0.npy"
