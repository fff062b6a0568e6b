"""Faster compilation for the tests of steps, which import `step_cases`."""

import pathlib
import sys

import jax
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))


@pytest.fixture(autouse=True)
def compile_quickly(few_optimizations: None) -> None:
    """Disables most optimizations, because these tests mostly compile."""


@pytest.fixture
def standard_promotion():
    """Parts of optax mix int32 counts with floats, which strict promotion refuses."""
    with jax.numpy_dtype_promotion("standard"):
        yield
