"""Eight virtual devices and strict dtype promotion for every test."""

import os
import pathlib

# Before jax starts its backend.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")

# Real lengths, beside the repository where they are present.
DATA = pathlib.Path(__file__).parents[2] / "shared" / "data"


def real_length_sets() -> list[tuple[str, np.ndarray]]:
    """(name, lengths of at least 1) of every column of every file, or nothing."""
    sets = []
    for path in sorted(DATA.glob("*.npz")):
        with np.load(path) as columns:
            for name in columns.files:
                lengths = columns[name]
                sets.append((f"{path.stem}-{name}", lengths[lengths > 0]))
    return sets


def pytest_generate_tests(metafunc: pytest.Metafunc):
    """`real_lengths` runs a test once for every real length set."""
    if "real_lengths" in metafunc.fixturenames:
        sets = real_length_sets()
        missing = pytest.param(
            None, id="none", marks=pytest.mark.skip(f"no real lengths in {DATA.name}/")
        )
        params = [pytest.param(x, id=name) for name, x in sets] or [missing]
        metafunc.parametrize("real_lengths", params)
