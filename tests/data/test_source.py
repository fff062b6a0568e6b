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


def to_bytes(example: dict) -> bytes:
    file = io.BytesIO()
    np.savez(file, **example)
    return file.getvalue()


def from_bytes(record: bytes) -> dict:
    with np.load(io.BytesIO(record)) as arrays:
        return {name: arrays[name] for name in arrays.files}


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


@pytest.mark.parametrize(
    ("source", "examples"),
    [
        (grain.MapDataset.source([*map(to_bytes, EXAMPLES)]).map(from_bytes), EXAMPLES),
        (Rows(EXAMPLES), [*map(as_python, EXAMPLES)]),
    ],
)
def test_batches_are_those_of_a_list(source, examples):
    for a, b in zip(batches(source), batches(examples), strict=True):
        for x, y in zip(a, b, strict=True):
            assert x.keys() == y.keys()
            for name in x:
                assert x[name].dtype == y[name].dtype
                np.testing.assert_array_equal(x[name], y[name])


LENGTHS = [1 + i % 3 for i in range(12)]


def dataset_of(source):
    plan = plan_buckets(LENGTHS, max_tokens=6)
    return batch_dataset(source, BatchSchedule(plan, LENGTHS, order="source"))


class Broken(list):
    """A source in which one example cannot be read or differs from the others."""

    def __init__(self, index, replacement):
        super().__init__({"x": np.arange(n)} for n in LENGTHS)
        self._index, self._replacement = index, replacement

    def __getitem__(self, index):
        if index == self._index:
            return self._replacement()
        return super().__getitem__(index)


def fail():
    raise OSError("disk gone")


@pytest.mark.parametrize("index", [0, 7])
def test_an_example_that_cannot_be_read_is_named_with_its_step(index):
    with pytest.raises(OSError, match=rf"disk gone[^$]*`source\[{index}\]`"):
        list(dataset_of(Broken(index, fail)))


@pytest.mark.parametrize(
    ("replacement", "message"),
    [(lambda: {"x": np.zeros(2)}, "'x': 'float64"), (lambda: {"y": [1, 2]}, "'y'")],
)
def test_an_example_that_differs_from_others_is_named(replacement, message):
    with pytest.raises(
        ValueError, match=rf"{message}[^$]*row 0[^$]*step 3 .*\[7, 10\]"
    ):
        list(dataset_of(Broken(7, replacement)))


def test_an_unsuitable_first_example_is_named():
    source = [{"x": np.arange(n), "name": 1} for n in LENGTHS]
    source[0]["name"] = "ab"
    with pytest.raises(ValueError, match=r"'name'[^$]*`source\[0\]`, the template"):
        list(dataset_of(source))


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
