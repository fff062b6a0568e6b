"""Checksums of states, over dtypes, contents and shardings."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxbucket as jb
from jaxbucket.train.state_checksum import checksum

VARIANTS = {
    "zeros": lambda: jnp.zeros((64, 64)),
    "negative zeros": lambda: -jnp.zeros((64, 64)),
    "ones": lambda: jnp.ones((64, 64)),
    "negative ones": lambda: -jnp.ones((64, 64)),
    "twos": lambda: jnp.full((64, 64), 2.0),
    "longer": lambda: jnp.zeros((64, 65)),
    "bfloat16": lambda: jnp.zeros((64, 64), jnp.bfloat16),
    "random": lambda: jax.random.normal(jax.random.key(0), (64, 64)),
    "transposed": lambda: jax.random.normal(jax.random.key(0), (64, 64)).T,
    "key": lambda: jax.random.key(1),
    "other key": lambda: jax.random.key(2),
    "bool": lambda: jnp.ones(3, bool),
    "other bool": lambda: jnp.zeros(3, bool),
    "complex": lambda: jnp.full(3, 1j),
    "real": lambda: jnp.full(3, 1 + 0j),
}


def test_checksums_of_different_arrays_differ():
    sums = {name: checksum(make()) for name, make in VARIANTS.items()}
    for one, other in itertools.combinations(sums, 2):
        assert sums[one] != sums[other], (one, other)
    assert sums == {name: checksum(make()) for name, make in VARIANTS.items()}


@pytest.mark.parametrize("spec", [(), ("data",), (None, "data")])
def test_checksums_do_not_depend_on_the_sharding(spec):
    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    sharding = NamedSharding(jb.data_mesh(), PartitionSpec(*spec))
    assert checksum([jax.device_put(x, sharding)]) == checksum([x])


def test_exchanged_arrays_have_other_checksums():
    x, y = jnp.arange(3.0), jnp.arange(3.0) + 1
    assert checksum([x, y]) != checksum([y, x])
