"""Batch normalization, dropout, frozen layers and averages together."""

import json
import pathlib

import jax
import numpy as np
import pytest
import whole_job

# With those of `test_two_processes_train_like_the_plain_loop`, all pairs.
ALL = [
    ("nnx", "jit", 1, 1),
    ("nnx", "shard_map", 8, 1),
    ("linen", "jit", 8, 2),
    ("linen", "shard_map", 1, 2),
    ("linen", "pmap", 8, 1),
]


def assert_equal(results, expected):
    for name, want in expected.items():
        got = results[name]
        if isinstance(want, dict):
            assert got.keys() == want.keys(), name
        else:
            got, want = {name: got}, {name: want}
        for key, value in want.items():
            np.testing.assert_allclose(
                got[key], value, rtol=1e-10, atol=1e-12, err_msg=f"{name} {key}"
            )


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "mode", "num_devices", "accumulate"), ALL)
def test_training_equals_a_plain_loop_over_unpadded_examples(
    kind, mode, num_devices, accumulate, tmp_path
):
    # optax mixes int32 counts with floats, which strict promotion refuses.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        devices = jax.devices()[:num_devices]
        folder = tmp_path / "checkpoints"
        results = whole_job.train(
            kind, mode, devices, accumulate=accumulate, folder=folder
        )
        expected = whole_job.reference(results["initial"], accumulate)
    assert_equal(results, expected)


@pytest.mark.exhaustive
def test_two_processes_train_like_the_plain_loop(launch, tmp_path):
    code = f"""
import sys
sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
sys.argv[1:] = {["nnx", "pmap", str(tmp_path / "ckpt"), str(tmp_path / "results")]}
import whole_job
whole_job.main()
"""
    launched = launch(code, count=2, devices=2)
    assert launched.status == 0, launched.output
    parts = [json.loads((tmp_path / f"results.{i}").read_text()) for i in range(2)]
    assert parts[0] == parts[1]
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        expected = whole_job.reference(parts[0]["initial"], 2)
    assert_equal(parts[0], expected)
