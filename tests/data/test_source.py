"""Batches from common kinds of sources are the same."""

import io

import grain
import numpy as np
import pytest

from jaxbucket import BatchSchedule, batch_dataset, measure_lengths, plan_buckets
from jaxbucket.data.source import contents

RNG = np.random.default_rng(0)
EXAMPLES = [
    {
        "tokens": RNG.integers(0, 999, n).astype(np.int32),
        "frames": RNG.normal(size=(n, 3)).astype(np.float32),
        "label": np.float32(n / 7),
        "index": np.int64(i),
    }
    for i, n in enumerate(RNG.integers(1, 30, 60))
]


def batches(source) -> list:
    lengths = measure_lengths(source, progress=False)
    plan = plan_buckets(lengths, max_tokens=120, num_buckets=3)
    return list(batch_dataset(source, BatchSchedule(plan, lengths)))


def assert_same(result: list, expected: list) -> None:
    for a, b in zip(result, expected, strict=True):
        for x, y in zip(a, b, strict=True):
            assert x.keys() == y.keys()
            for name in x:
                assert x[name].dtype == y[name].dtype
                np.testing.assert_array_equal(x[name], y[name])


def to_bytes(example: dict) -> bytes:
    file = io.BytesIO()
    np.savez(file, **example)
    return file.getvalue()


def from_bytes(record: bytes) -> dict:
    with np.load(io.BytesIO(record)) as arrays:
        return {name: arrays[name] for name in arrays.files}


def test_batches_from_a_map_dataset():
    dataset = grain.MapDataset.source(list(map(to_bytes, EXAMPLES))).map(from_bytes)
    assert_same(batches(dataset), batches(EXAMPLES))


class Rows:
    """Rows like those of a Hugging Face dataset: dicts of lists of Python values."""

    def __init__(self, examples):
        self._examples = examples

    def __len__(self):
        return len(self._examples)

    def __getitem__(self, index):
        if not isinstance(index, int):
            raise TypeError(f"{index!r} is not an int")
        return {
            name: np.asarray(x).tolist() for name, x in self._examples[index].items()
        }


def as_python(example: dict) -> dict:
    return {name: np.asarray(np.asarray(x).tolist()) for name, x in example.items()}


def test_batches_from_rows_of_lists():
    assert_same(batches(Rows(EXAMPLES)), batches(list(map(as_python, EXAMPLES))))


class Broken(list):
    """A source in which one example cannot be read or differs from the others."""

    def __init__(self, index, replacement):
        super().__init__({"x": np.arange(1 + i % 3)} for i in range(12))
        self._index, self._replacement = index, replacement

    def __getitem__(self, index):
        if index == self._index:
            return self._replacement()
        return super().__getitem__(index)


def fail():
    raise OSError("disk gone")


@pytest.mark.parametrize("index", [0, 7])
def test_an_example_that_cannot_be_read_is_named_with_its_step(index):
    lengths = [1 + i % 3 for i in range(12)]
    plan = plan_buckets(lengths, max_tokens=6)
    dataset = batch_dataset(Broken(index, fail), BatchSchedule(plan, lengths))
    with pytest.raises(OSError, match=rf"disk gone[^$]*`source\[{index}\]`"):
        list(dataset)


@pytest.mark.parametrize(
    ("replacement", "message"),
    [(lambda: {"x": np.zeros(2)}, "'x': 'float64"), (lambda: {"y": [1, 2]}, "'y'")],
)
def test_an_example_that_differs_from_others_is_named(replacement, message):
    lengths = [1 + i % 3 for i in range(12)]
    plan = plan_buckets(lengths, max_tokens=6)
    schedule = BatchSchedule(plan, lengths, order="source")
    with pytest.raises(
        ValueError, match=rf"{message}[^$]*row 0[^$]*step 3 .*\[7, 10\]"
    ):
        list(batch_dataset(Broken(7, replacement), schedule))


def test_an_unsuitable_first_example_is_named():
    lengths = [1 + i % 3 for i in range(12)]
    plan = plan_buckets(lengths, max_tokens=6)
    source = [{"x": np.arange(n), "name": 1} for n in lengths]
    source[0]["name"] = "ab"
    dataset = batch_dataset(source, BatchSchedule(plan, lengths))
    with pytest.raises(ValueError, match=r"'name'[^$]*`source\[0\]`, the template"):
        list(dataset)


def test_an_unreadable_example_of_the_sample_is_named():
    source = Broken(0, fail)
    with pytest.raises(OSError, match=r"`source\[0\]`"):
        contents(source)


class Image:
    """An object without a `__repr__` of its own, like a picture."""

    def __init__(self, pixels):
        self.pixels = pixels


def test_objects_are_identified_by_their_contents():
    # All alive at the same time, so that their addresses differ.
    pixels = ([1, 2, 3], [1, 2, 3], [1, 2, 4])
    sources = [[{"x": [1, 2], "image": Image(values)}] for values in pixels]
    one, same, other = map(contents, sources)
    assert one == same != other
    # Not every object can be pickled.
    readers = [[{"x": [1, 2], "image": lambda: None}] for _ in range(2)]
    one, same = map(contents, readers)
    assert one == same != other


def test_digests_of_arrays_text_and_plain_objects_are_stable():
    texts = np.array(["ab", "c"], object)
    example = {
        "x": np.arange(3, dtype="i4"),
        "name": "é",
        "texts": texts,
        "of": {"a": [1, None]},
    }
    assert contents([example]) == "ded8d569b6e5549d8a5af50b49113d21"
