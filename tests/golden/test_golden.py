"""Rows, shapes and losses are those of earlier versions."""

import json
import pathlib
import sys

import jax
import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import golden

GOLDEN = json.loads(golden.FILE.read_text())
SLOW = pytest.mark.exhaustive
QUICK = ("lognormal", "gsm8k-answer_bytes", "azure_code-generated")


@pytest.mark.parametrize("name", golden.schedules())
def test_a_schedule_has_the_rows_of_earlier_versions(name):
    schedule = golden.schedules()[name]()
    assert golden.schedule_digest(schedule) == GOLDEN["schedules"][name]


@pytest.mark.parametrize("name", golden.streams())
def test_a_stream_has_the_batches_of_earlier_versions(name):
    assert golden.stream_digest(golden.streams()[name]()) == GOLDEN["streams"][name]


def test_rows_are_packed_as_by_earlier_versions():
    assert golden.packing_digest() == GOLDEN["packing"]


@pytest.mark.parametrize(
    ("name", "lengths", "num_buckets"),
    [
        pytest.param(
            *case, marks=() if case[0] in QUICK else SLOW, id=f"{case[0]}, {case[2]}"
        )
        for case in golden.plans()
    ],
)
def test_a_plan_has_the_shapes_of_earlier_versions(name, lengths, num_buckets):
    expected = GOLDEN["plans"][f"{name}, {num_buckets}"]
    plan = golden.plan_of(lengths, num_buckets)
    if expected["shapes"]:
        assert plan == expected
    else:
        assert plan["tokens"] <= 1.001 * expected["tokens"]


@pytest.mark.parametrize(
    "mode", ["jit", *(pytest.param(x, marks=SLOW) for x in ("shard_map", "pmap"))]
)
def test_training_has_the_losses_of_earlier_versions(mode):
    with jax.numpy_dtype_promotion("standard"):
        losses = golden.losses(mode)
    np.testing.assert_allclose(losses, GOLDEN["losses"], rtol=1e-4)
