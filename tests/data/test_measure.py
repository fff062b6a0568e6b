"""Lengths and difficulties are those of the functions, however they are measured."""

import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from jaxbucket.data import measure_difficulty, measure_lengths


class Source:
    """Examples `{"x": [n], "y": [m, 2]}` that count how often they are read."""

    def __init__(self, size=1000):
        self.size, self.reads = size, 0

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.reads += 1
        return {"x": np.zeros(1 + index * 7919 % 50), "y": np.ones((3, 1 + index % 4))}


def lengths_of(size):
    return 1 + np.arange(size) * 7919 % 50


def by_x(example):
    return len(example["x"])


def half(example):
    return len(example["x"]) / 2


SEVERAL = {"x": [], "rows": ["y"], "columns": ["y"]}


def test_lengths_of_one_and_of_several_sequences():
    found = measure_lengths(Source(), sequences=["x"], progress=False)
    assert found.dtype == np.int32 and found.tolist() == lengths_of(1000).tolist()
    several = measure_lengths(
        Source(), sequences=SEVERAL, num_workers=2, progress=False
    )
    assert list(several) == ["columns", "rows", "x"]
    assert several["x"].tolist() == found.tolist()
    assert set(several["rows"]) == {3}
    assert several["columns"].tolist() == [1 + i % 4 for i in range(1000)]
    functions = {"x": by_x, "columns": lambda x: x["y"].shape[1]}
    for sequences in ({"x": [], "columns": ["y"]}, None):
        named = measure_lengths(
            Source(), sequences=sequences, length_fn=functions, progress=False
        )
        assert {x: y.tolist() for x, y in named.items()} == {
            name: several[name].tolist() for name in ("columns", "x")
        }


def test_difficulties_of_one_and_of_several_metrics():
    found = measure_difficulty(Source(), half, progress=False)
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, lengths_of(1000) / 2)
    functions = {"length": by_x, "half": half}
    several = measure_difficulty(Source(), functions, progress=False)
    assert list(several) == ["half", "length"]
    np.testing.assert_array_equal(several["length"], 2 * several["half"])


def test_measured_values_are_read_from_the_cache(tmp_path):
    source = Source()

    def reads(make=measure_lengths, source=source, **options):
        source.reads = 0
        make(source, **{"cache": tmp_path, "progress": False, **options})
        return source.reads

    whole, sample = reads(sequences=["x"]), reads(sequences=["x"])
    assert whole == 1000 + sample and sample < 50
    # Another definition of length, key, size, or contents.
    for options in (
        {"sequences": ["y"]},
        {"length_fn": by_x, "cache_key": "1"},
        {"length_fn": by_x, "cache_key": "2"},
        {"sequences": ["x"], "source": Source(999)},
        {"make": measure_difficulty, "difficulty_fn": by_x, "cache_key": "1"},
    ):
        assert reads(**options) > 900
        assert reads(**options) == sample
    source.fingerprint = "2"
    assert reads(sequences=["x"]) > 900


def test_only_missing_shares_are_measured_again(tmp_path):
    options = {"sequences": ["x"], "cache": tmp_path, "progress": False}

    class Interrupted(Source):
        def __getitem__(self, index):
            if index == 700:
                raise KeyboardInterrupt
            return super().__getitem__(index)

    with pytest.raises(KeyboardInterrupt):
        measure_lengths(Interrupted(), **options)
    source = Source()
    assert measure_lengths(source, **options).tolist() == lengths_of(1000).tolist()
    assert source.reads < 450
    paths = sorted(tmp_path.iterdir())
    assert all(path.suffix == ".npy" for path in paths)
    paths[0].unlink()
    assert measure_lengths(source, **options).tolist() == lengths_of(1000).tolist()
    paths[1].write_bytes(b"damaged")
    with pytest.raises(Exception, match="Delete it"):
        measure_lengths(source, **options)


class Group:
    """Process `index` of several, whose values are all the same but for `other`."""

    def __init__(self, index=0, count=3, other=None):
        self.index, self.count, self.other = index, count, other

    def gather(self, name, value):
        values = [value] * self.count
        return values if self.other is None else [*values[1:], self.other]


@pytest.mark.parametrize(("size", "count"), [(1000, 3), (2, 4)])
def test_a_process_measures_a_share_of_difficulties(tmp_path, size, count):
    for cache in ({}, {"cache": tmp_path, "cache_key": "1"}):
        parts = []
        for index in range(count):
            source = Source(size)
            options = {"processes": Group(index, count), "progress": False, **cache}
            parts.append(measure_difficulty(source, by_x, **options))
            assert source.reads < 500
        np.testing.assert_array_equal(np.concatenate(parts), lengths_of(size))


@pytest.mark.exhaustive
def test_processes_measure_lengths_together(launch, tmp_path):
    code = f"""
import numpy as np
import jaxbucket as jb

class Source:
    reads = 0
    def __len__(self):
        return 3000
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
        record(int(lengths.sum()), source.reads < (1200, 50)[attempt])
"""
    run = launch(code, count=3)
    assert run.status == 0, run.output
    for index in range(3):
        assert run.recorded(index) == [f"{lengths_of(3000).sum()} True"] * 2


SCRIPT = """
import os, sys, time
import numpy as np
import jaxbucket as jb

class Source:
    def __len__(self):
        return 3000
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


@pytest.mark.exhaustive
def test_a_pass_continues_after_a_worker_or_the_parent_is_killed(tmp_path):
    script, cache = tmp_path / "script.py", tmp_path / "cache"
    script.write_text(SCRIPT)

    def start(*args: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, script, cache, *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    with start("lost") as run:
        _, error = run.communicate(timeout=200)
    assert run.returncode == 1 and "RuntimeError: A worker process died" in error
    before = len(list(cache.glob("*.npy")))
    with start() as run:
        deadline = time.monotonic() + 200
        while len(list(cache.glob("*.npy"))) <= before:
            assert time.monotonic() < deadline and run.poll() is None
            time.sleep(0.01)
        run.send_signal(signal.SIGKILL)
        run.communicate()
    with start() as run:
        out, error = run.communicate(timeout=200)
    assert out == f"{lengths_of(3000).sum()}\n", error


@pytest.mark.parametrize(
    "source",
    [
        "lengths.npy",
        [],
        [{"x": 3}],
        [{"x": []}],
        [{"x": [1], "y": [1, 2]}],
        [[1, 2]],
        [{"x": [[1], [1, 2]]}],
        [{"x": [{"role": "user"}, {"role": "model"}]}],
        [{"x": np.array([[1], [1, 2]], object)}],
        [{"x": np.zeros((1, 7))}, {"x": np.zeros((1, 9))}],
    ],
)
def test_examples_without_a_length_are_refused(source):
    with pytest.raises(ValueError, match="`source|All lengths are 1"):
        measure_lengths(source, progress=False)


@pytest.mark.parametrize(
    "length", [0, -1, 2**31, 1.0, "3", None, [3]] + [pytest.param(np.nan, id="nan")]
)
def test_invalid_results_of_a_function_are_refused(length):
    with pytest.raises(ValueError, match=r"`length_fn`[^$]*`source\[0\]`"):
        measure_lengths([1, 2], length_fn=lambda x: length, progress=False)


@pytest.mark.parametrize("value", [np.nan, np.inf, "3", None, [3]])
def test_invalid_difficulties_are_refused(value):
    with pytest.raises(ValueError, match=r"`difficulty_fn`[^$]*`source\[0\]`"):
        measure_difficulty([1], lambda x: value, progress=False)


@pytest.mark.parametrize(
    ("make", "options", "name"),
    [
        (measure_lengths, {"num_workers": -1}, "num_workers"),
        (measure_lengths, {"length_fn": 3}, "length_fn"),
        (measure_lengths, {"length_fn": {"x": by_x}}, "length_fn"),
        (measure_lengths, {"sequences": ["z"]}, "source"),
        (measure_lengths, {"sequences": {"x": [], "z": []}}, "source"),
        (measure_lengths, {"sequences": SEVERAL, "length_fn": by_x}, "length_fn"),
        (
            measure_lengths,
            {"sequences": SEVERAL, "length_fn": {"z": by_x}},
            "length_fn",
        ),
        (
            measure_lengths,
            {"sequences": ["x"], "length_fn": {"x": by_x, "y": by_x}},
            "sequences",
        ),
        (measure_lengths, {"length_fn": by_x, "cache": "cache"}, "cache_key"),
        (measure_lengths, {"processes": Group()}, "cache"),
        (measure_difficulty, {"difficulty_fn": {}}, "difficulty_fn"),
        (measure_difficulty, {"cache": "cache"}, "cache_key"),
        (measure_difficulty, {"processes": Group(other="0")}, "source"),
    ],
)
def test_invalid_arguments_are_refused(make, options, name):
    if make is measure_difficulty:
        options = {"difficulty_fn": by_x, **options}
    with pytest.raises(ValueError, match=f"`{name}"):
        make(Source(3), **{"progress": False, **options})
