"""Faster compilation for the tests of steps."""

import pytest


@pytest.fixture(autouse=True)
def compile_quickly(few_optimizations: None) -> None:
    """Disables most optimizations, because these tests mostly compile."""
