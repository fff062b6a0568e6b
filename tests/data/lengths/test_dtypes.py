"""The dtypes in which metrics are stored."""

import re

import numpy as np
import pytest

import jaxbucket as jb
from jaxbucket.data import measure_difficulty
from jaxbucket.data.lengths import parallel_pass

CHUNK = 100


def measured(source, metric, **options):
    return measure_difficulty(source, metric, progress=False, **options)


@pytest.mark.parametrize("dtype", ["int32", "int64", "float64", np.dtype(">i8")])
def test_values_keep_their_dtype(tmp_path, dtype):
    source = [2**24 + 1, -(2**24) - 1, 0, 2**31 - 1]
    for cache in (None, tmp_path, tmp_path):
        values = measured(source, int, dtype=dtype, cache=cache, cache_key="1")
        assert values.dtype == np.dtype(dtype).newbyteorder("=")
        assert values.tolist() == source
    if dtype == "int64":
        index = jb.sort.write_difficulty_index(tmp_path / "x", values, jb.data_mesh())
        assert index.difficulty.tolist() == source
    # Values of a different dtype have the same file.
    with pytest.raises(ValueError, match=r"instead of float32\[4\]. Delete the file"):
        measured(source, int, cache=tmp_path, cache_key="1")


def test_metrics_may_have_different_dtypes():
    metrics = {"n": int, "half": lambda x: x / 2, "big": lambda x: x << 40}
    source = [3, 5]
    values = measured(source, metrics, dtype={"n": "int32", "big": np.int64})
    dtypes = {name: str(x.dtype) for name, x in values.items()}
    assert dtypes == {"n": "int32", "half": "float32", "big": "int64"}
    assert values["big"].tolist() == [3 << 40, 5 << 40]


def test_an_interrupted_pass_of_integers_is_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr(parallel_pass, "_CHUNK", CHUNK)
    calls = []

    def zero(index):
        if len(calls) == 150:
            calls.clear()
            raise KeyboardInterrupt
        calls.append(index)
        return 0

    options = {"dtype": "int64", "cache": tmp_path, "cache_key": "1"}
    with pytest.raises(KeyboardInterrupt):
        measured(range(250), zero, **options)
    assert measured(range(250), zero, **options).tolist() == [0] * 250
    assert len(calls) == 250 - CHUNK


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        ("int16", "`dtype='int16'` is not a dtype of difficulties. Pass one of ['flo"),
        (None, "`dtype=None` is not a dtype of difficulties."),
        ("text", "`dtype='text'` is not a dtype of difficulties."),
        ({"a": bool}, "`dtype['a']=<class 'bool'>` is not a dtype of difficulties."),
        (
            {"c": "int64"},
            "`dtype={'c': 'int64'}` names ['c'], which are not metrics in `difficu",
        ),
        (
            {"b": "int32"},
            "`source[0]`, metric 'b', has difficulty 0.5, which is not an integer from "
            "-2147483647 to 2147483647, as `dtype=int32` requires. Remove the example",
        ),
        ({"a": "int32"}, "metric 'a', has difficulty 2147483648, which is not an int"),
    ],
)
def test_invalid_dtypes_and_values_are_refused(dtype, message):
    metrics = {"a": lambda x: 2**31, "b": lambda x: x}
    with pytest.raises(ValueError, match=re.escape(message)):
        measured([0.5], metrics, dtype=dtype)
