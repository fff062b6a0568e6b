"""Quick compiles for quick tests."""

import jax
import pytest


@pytest.fixture(autouse=True)
def few_optimizations(request):
    """XLA leaves out what takes it long; the exhaustive tests have all of it."""
    jax.config.update(
        "jax_disable_most_optimizations",
        request.node.get_closest_marker("exhaustive") is None,
    )
    yield
    jax.config.update("jax_disable_most_optimizations", False)
