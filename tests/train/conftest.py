"""Quick compiles for the tests of steps."""

import pytest


@pytest.fixture(autouse=True)
def compile_quickly(few_optimizations: None) -> None:
    """Most of these tests spend their time compiling."""
