"""Measuring several lengths or difficulties of each example in one pass."""

import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import jaxbucket as jb
from jaxbucket.data import measure_difficulty
from jaxbucket.data.lengths import parallel_pass

SIZE = 2500
SEQUENCES = {"target": ["target", "weights"], "source": ["source"]}


def source_length(index: int) -> int:
    return 1 + index * 7919 % 50


def target_length(index: int) -> int:
    return 1 + index * 104729 % 31


class Pairs:
    """Examples whose lengths follow formulas. Counts the reads, and may stop."""

    def __init__(self, size: int = SIZE, stop: int = -1):
        self.size = size
        self.stop = stop
        self.reads = 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if index == self.stop:
            raise KeyboardInterrupt
        self.reads += 1
        target = np.zeros(target_length(index))
        source = np.zeros(source_length(index))
        return {"source": source, "target": target, "weights": target}


LENGTHS = {
    "source": np.array([source_length(index) for index in range(SIZE)]),
    "target": np.array([target_length(index) for index in range(SIZE)]),
}


def measured(source, **options):
    return jb.measure_lengths(source, progress=False, **options)


def assert_lengths(lengths):
    assert list(lengths) == ["source", "target"]
    for name, column in lengths.items():
        assert column.dtype == np.int32
        np.testing.assert_array_equal(column, LENGTHS[name])


@pytest.mark.parametrize(
    "num_workers", [0, pytest.param(2, marks=pytest.mark.exhaustive)]
)
def test_all_sequences_are_measured_in_one_pass(tmp_path, num_workers):
    for cache in (None, tmp_path / "cache"):
        source = Pairs()
        lengths = measured(
            source, sequences=SEQUENCES, num_workers=num_workers, cache=cache
        )
        assert_lengths(lengths)
        # The cache also reads a sample of the examples.
        assert num_workers or SIZE <= source.reads <= SIZE + 16 * (cache is not None)
    plan = jb.plan_buckets(lengths, max_tokens=8192, seq_len_multiple=32)
    assert plan.sequences == ("source", "target")


def test_lengths_and_files_are_those_of_one_pass_for_each_sequence(tmp_path):
    singly = {
        name: measured(Pairs(), sequences=features, cache=tmp_path / "singly")
        for name, features in SEQUENCES.items()
    }
    together = measured(Pairs(), sequences=SEQUENCES, cache=tmp_path / "together")
    for name, column in together.items():
        np.testing.assert_array_equal(column, singly[name])
        assert not column.flags.writeable
    files = [sorted((tmp_path / x).iterdir()) for x in ("singly", "together")]
    assert [x.name for x in files[0]] == [x.name for x in files[1]]
    assert [x.read_bytes() for x in files[0]] == [x.read_bytes() for x in files[1]]


def test_only_sequences_that_are_not_in_the_cache_are_measured(tmp_path):
    measured(Pairs(), sequences=["source"], cache=tmp_path)
    calls = []

    def length_of_target(example):
        calls.append(example)
        return len(example["target"])

    for _ in range(2):
        source = Pairs()
        lengths = measured(
            source,
            sequences=SEQUENCES,
            length_fn={"target": length_of_target},
            cache=tmp_path,
            cache_key={"target": "1"},
        )
        assert_lengths(lengths)
        assert len(calls) == SIZE
    assert source.reads < 20
    assert len(list(tmp_path.iterdir())) == 2


def test_sequences_may_be_measured_by_functions(tmp_path):
    functions = {"words": lambda x: len(x.split()), "letters": len}
    texts = ["to be", "or", "not to be"]
    keys = {"words": "words-1", "letters": "letters-1"}
    for cache in (None, tmp_path):
        lengths = measured(texts, length_fn=functions, cache=cache, cache_key=keys)
        assert {x: y.tolist() for x, y in lengths.items()} == {
            "letters": [5, 2, 9],
            "words": [2, 1, 3],
        }
    # The files are those of single functions with the same keys.
    letters = measured(texts, length_fn=hash, cache=tmp_path, cache_key="letters-1")
    assert letters.tolist() == [5, 2, 9]
    # Another key measures only its own function again.
    functions = {"words": lambda x: 7, "letters": lambda x: 7}
    lengths = measured(
        texts, length_fn=functions, cache=tmp_path, cache_key={**keys, "words": "2"}
    )
    assert lengths["words"].tolist() == [7, 7, 7]
    assert lengths["letters"].tolist() == [5, 2, 9]


@pytest.mark.parametrize("stop", [0, 1023, 1024, 2100])
def test_an_interrupted_pass_is_resumed(tmp_path, stop):
    with pytest.raises(KeyboardInterrupt):
        measured(Pairs(stop=stop), sequences=SEQUENCES, cache=tmp_path)
    source = Pairs()
    assert_lengths(measured(source, sequences=SEQUENCES, cache=tmp_path))
    assert source.reads <= SIZE - stop // 1024 * 1024 + 16
    assert [x.suffix for x in tmp_path.iterdir()] == [".npy"] * 2


@pytest.mark.parametrize("state", ["part", "all", "foreign", "truncated"])
def test_a_kill_between_the_files_of_two_sequences_loses_nothing(tmp_path, state):
    measured(Pairs(), sequences=SEQUENCES, cache=tmp_path)
    for path in sorted(tmp_path.iterdir()):
        # One file is complete, and the other one still has its temporary name.
        partial = path.with_suffix(".partial")
        path.rename(partial)
        if state == "part":
            np.lib.format.open_memmap(partial, "r+")[1500] = 0
        elif state == "foreign":
            partial.write_bytes(b"x" * 1000)
        elif state == "truncated":
            os.truncate(partial, 100)
        source = Pairs()
        assert_lengths(measured(source, sequences=SEQUENCES, cache=tmp_path))
        again = {"part": parallel_pass._CHUNK, "all": 0}.get(state, SIZE)
        assert again <= source.reads <= again + 16


@pytest.mark.parametrize("damage", ["truncated", "foreign", "zeros"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_damaged_cache_file_of_any_sequence_is_refused(tmp_path, damage, which):
    measured(Pairs(), sequences=SEQUENCES, cache=tmp_path)
    file = sorted(tmp_path.iterdir())[which]
    if damage == "truncated":
        os.truncate(file, file.stat().st_size - 4)
    elif damage == "foreign":
        np.save(file, np.ones(7))
    else:
        np.save(file, np.zeros(SIZE, np.int32))
    with pytest.raises(ValueError, match=rf"{file.name} .* Delete the file to measu"):
        measured(Pairs(), sequences=SEQUENCES, cache=tmp_path)


def test_a_token_file_has_lengths_for_each_feature(tmp_path):
    examples = [{"x": np.arange(n), "y": np.arange(n)} for n in (3, 1)]
    file = jb.data.write_token_file(tmp_path / "file", examples)
    lengths = measured(file, sequences={"x": ["x"], "y": ["y"]})
    assert {x: y.tolist() for x, y in lengths.items()} == {"x": [3, 1], "y": [3, 1]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"sequences": {"source": ["source"]}},
            "`sequences` is a mapping with the sequences ['source']. Name at least two",
        ),
        (
            {"sequences": {"source": ["weights"], "target": ["weights"]}},
            "`sequences` lists 'weights' for 2 sequences, but its shape is [1]",
        ),
        (
            {"sequences": {"source": [], 2: []}},
            "`sequences` has sequence names that are not strings: [2]. Use the names",
        ),
        (
            {"sequences": SEQUENCES, "length_fn": {}},
            "`length_fn` is empty. Name at least one function.",
        ),
        (
            {"sequences": {"source": [], "text": []}},
            "`source[0]`, sequence 'text': `sequences['text']=['text']`: ['text'] are ",
        ),
        (
            {"sequences": {"source": ["target"], "weights": []}},
            "`source[1]`, sequence 'source': The example has sequences of differ",
        ),
        (
            {"sequences": SEQUENCES, "length_fn": len},
            "`length_fn` is one function, but `sequences` names ['target', 'source']. "
            "Pass a mapping with the function of each.",
        ),
        (
            {"sequences": SEQUENCES, "length_fn": {"text": len}},
            "`length_fn` has functions for ['text'], but `sequences` names ['target', ",
        ),
        (
            {"sequences": ["source"], "length_fn": {"source": len, "target": len}},
            "`length_fn` has functions for ['source', 'target'], but `sequences="
            "['source']` names the features of one sequence. Pass a mapping",
        ),
        (
            {"length_fn": {"source": len}},
            "`length_fn` is a mapping with the sequences ['source']. Name at least two",
        ),
        (
            {"length_fn": {"source": len, "target": 3}},
            "`length_fn['target']=3`: pass a mapping from strings to functions",
        ),
        (
            {"length_fn": {"source": len, "target": lambda x: 0}},
            "`source[0]`, sequence 'target', has length 0, which is not an integer "
            "from 1 to 2147483647. Remove the example, or fix `length_fn['target']`.",
        ),
        (
            {"length_fn": {"source": len, "target": lambda x: x["text"]}},
            "`source[0]`, sequence 'target' cannot be measured: KeyError: 'text'",
        ),
        (
            {"sequences": SEQUENCES, "num_workers": -1},
            "`num_workers=-1` must not be negative",
        ),
    ],
)
def test_invalid_sequences_and_functions_are_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        measured(Pairs(3), **options)


def test_features_that_are_not_listed_are_named():
    message = r"`sequences\['target'\]=None` must be a list with the features that are"
    with pytest.raises(ValueError, match=message):
        measured(Pairs(3), sequences={"source": [], "target": None})


def test_a_name_is_not_a_list_of_letters_in_the_cache(tmp_path):
    examples = [{"ab": [1] * 5, "a": [1] * 3, "b": [1] * 3}]
    assert measured(examples, sequences="ab", cache=tmp_path) == [5]
    assert measured(examples, sequences=["a", "b"], cache=tmp_path) == [3]
    assert measured(examples, sequences=["ab"], cache=tmp_path) == [5]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("cache_key", "message"),
    [
        (
            None,
            "changes of the functions in `length_fn`. Pass a name for each, such as "
            "`cache_key={'a': 'a-1', 'b': 'b-1'}`",
        ),
        ("1", "`cache_key='1'` must be a mapping with a name for each function in `le"),
        ({"a": "1"}, "`cache_key={'a': '1'}` must be a mapping with a name for each "),
        (
            {"a": "1", "b": "1"},
            "`cache_key={'a': '1', 'b': '1'}` gives two functions the same name, and "
            "their files would be the same. Pass different names, such as {'a': 'a-1'",
        ),
        ({"a": None, "b": "1"}, "`cache_key['a']=None` must be a non-empty string"),
        ({"a": "1", "b": ""}, "`cache_key['b']=''` must be a non-empty string"),
    ],
)
def test_the_cache_requires_a_key_for_each_function(tmp_path, cache_key, message):
    functions = {"a": len, "b": len}
    with pytest.raises(ValueError, match=re.escape(message)):
        measured(["x"], length_fn=functions, cache=tmp_path, cache_key=cache_key)
    assert not list(tmp_path.iterdir())


def test_one_function_has_one_key(tmp_path):
    for options in ({"length_fn": len}, {"sequences": SEQUENCES}):
        with pytest.raises(ValueError, match="={'a': '1'}` is a mapping, which req"):
            measured(Pairs(3), cache=tmp_path, cache_key={"a": "1"}, **options)


def test_several_metrics_are_measured_in_one_pass(tmp_path):
    metrics = {
        "ratio": lambda x: len(x["target"]) / len(x["source"]),
        "length": lambda x: len(x["source"]),
    }
    keys = {name: f"{name}-1" for name in metrics}
    for cache in (None, tmp_path, tmp_path):
        source = Pairs()
        scores = measure_difficulty(
            source, metrics, cache=cache, cache_key=keys, progress=False
        )
        assert list(scores) == ["length", "ratio"]
        ratio = LENGTHS["target"] / LENGTHS["source"]
        np.testing.assert_array_equal(scores["ratio"], ratio.astype(np.float32))
        np.testing.assert_array_equal(scores["length"], LENGTHS["source"])
    assert source.reads < 20
    # The files are those of single metrics with the same keys.
    single = measure_difficulty(
        Pairs(), len, cache=tmp_path, cache_key="ratio-1", progress=False
    )
    np.testing.assert_array_equal(single, scores["ratio"])


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({}, "`difficulty_fn` is empty. Name at least one function."),
        ({1: len}, "`difficulty_fn[1]=<built-in function len>`: pass a mapping from "),
        (
            {"rarity": lambda x: float("nan")},
            "`source[0]`, metric 'rarity', has difficulty nan, which is not a finite "
            "32-bit number. Remove the example, or fix `difficulty_fn['rarity']`.",
        ),
    ],
)
def test_invalid_metrics_are_refused(metrics, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        measure_difficulty(Pairs(3), metrics, progress=False)


SCRIPT = """
import os, sys, time
import numpy as np
import jaxbucket as jb

class Pairs:
    def __len__(self):
        return 2500
    def __getitem__(self, index):
        time.sleep(0.001)
        return {
            "source": np.zeros(1 + index * 7919 % 50),
            "target": np.zeros(1 + index * 104729 % 31),
        }

if __name__ == "__main__":
    sequences = {"source": ["source"], "target": ["target"]}
    lengths = jb.measure_lengths(
        Pairs(), sequences=sequences, num_workers=2, cache=sys.argv[1], progress=False
    )
    print(*[int(x.sum()) for x in lengths.values()])
"""


@pytest.mark.exhaustive
def test_a_pass_is_resumed_after_it_is_killed(tmp_path):
    script, cache = tmp_path / "script.py", tmp_path / "cache"
    script.write_text(SCRIPT)

    def start():
        return subprocess.Popen(
            [sys.executable, script, cache], stdout=subprocess.PIPE, text=True
        )

    with start() as run:
        deadline = time.monotonic() + 200
        while not any(np.load(path).any() for path in cache.glob("*.partial")):
            assert time.monotonic() < deadline and run.poll() is None
            time.sleep(0.02)
        run.send_signal(signal.SIGKILL)
    partial = sorted(cache.glob("*.partial"))
    assert len(partial) == 2 and not list(cache.glob("*.npy"))
    with start() as run:
        out, _ = run.communicate(timeout=200)
    assert out.split() == [str(LENGTHS[name].sum()) for name in ("source", "target")]
    assert sorted(cache.iterdir()) == [path.with_suffix(".npy") for path in partial]


@pytest.mark.exhaustive
def test_each_process_measures_a_share_of_every_sequence(launch, tmp_path):
    code = f"""
import numpy as np
import jaxbucket as jb

class Pairs:
    reads = 0
    def __len__(self):
        return {SIZE}
    def __getitem__(self, index):
        self.reads += 1
        return {{
            "source": np.zeros(1 + index * 7919 % 50),
            "target": np.zeros(1 + index * 104729 % 31),
        }}

def ratio(example):
    return len(example["target"]) / len(example["source"])

def source_length(example):
    return len(example["source"])

sequences = {{"source": ["source"], "target": ["target"]}}
metrics = {{"ratio": ratio, "length": source_length}}
with jb.Processes(timeout=10) as processes:
    options = dict(
        cache={str(tmp_path / "cache")!r}, processes=processes, progress=False
    )
    # The first pass finds the lengths of one sequence in the cache.
    jb.measure_lengths(Pairs(), sequences=["source"], **options)
    for attempt in range(2):
        source = Pairs()
        lengths = jb.measure_lengths(source, sequences=sequences, **options)
        sums = [int(x.sum()) for x in lengths.values()]
        record(*sums, source.reads < {SIZE} / 3 + 20 - 800 * attempt)
    scores = jb.data.measure_difficulty(
        Pairs(), metrics, cache_key={{"ratio": "r", "length": "l"}}, **options
    )
    record(*[len(x) for x in scores.values()], float(scores["length"].sum()))
    try:
        other = dict(reversed(sequences.items())) if processes.index else metrics
        jb.measure_lengths(Pairs(), sequences=dict.fromkeys(other, []), **options)
    except ValueError as error:
        record("different sources" in str(error))
"""
    run = launch(code, count=3)
    assert run.status == 0, run.output
    sums = " ".join(str(LENGTHS[name].sum()) for name in ("source", "target"))
    total = 0.0
    for index in range(3):
        first, second, scores, refused = run.recorded(index)
        assert first == second == f"{sums} True"
        length, other, part = scores.split()
        assert length == other and refused == "True"
        total += float(part)
    assert total == LENGTHS["source"].sum()
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} == {".npy"}
