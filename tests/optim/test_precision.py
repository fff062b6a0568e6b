"""Averages against double precision."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxbucket.optim.precision import moved_toward


@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
@pytest.mark.parametrize(
    "weight", [0, 1e-9, 1e-3, 0.49, 0.5, 0.51, 0.999, 1 - 2**-24, 1]
)
def test_an_average_is_as_precise_as_its_dtype(weight, dtype):
    sizes = 10.0 ** np.arange(-15, 16)
    direction = 0.6 + 0.8j if dtype == np.complex64 else 1
    old, new = (
        np.asarray(direction * x.ravel(), dtype) for x in np.meshgrid(sizes, sizes)
    )
    weight = np.float32(weight)
    exact = (1 - np.float64(weight)) * old + np.float64(weight) * new
    average = moved_toward(jnp.asarray(old), jnp.asarray(new), jnp.asarray(weight))
    assert average.dtype == dtype
    np.testing.assert_allclose(average, exact, rtol=3e-7)
