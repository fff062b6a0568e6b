"""Lets the tests of steps import `step_cases`."""

import pathlib
import sys

import jax
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))


@pytest.fixture
def standard_promotion():
    """Parts of optax mix int32 counts with floats, which strict promotion refuses."""
    with jax.numpy_dtype_promotion("standard"):
        yield
