"""Faster compilation for the tests of steps."""

import jax
import pytest


@pytest.fixture(autouse=True)
def compile_quickly(few_optimizations: None) -> None:
    """Disables most optimizations, because these tests mostly compile."""


@pytest.fixture
def standard_promotion():
    """Parts of optax mix int32 counts with floats, which strict promotion refuses."""
    with jax.numpy_dtype_promotion("standard"):
        yield
