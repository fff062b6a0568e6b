"""A model without batches, examples, meshes and an optimizer for tests of steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import jaxbucket as jb

MODES = ["jit", "shard_map", "pmap"]
EXHAUSTIVE = pytest.mark.exhaustive
SYMBOLS, WIDTH = 12, 6

# Shape of the mesh, its axes, and those over which rows are sharded.
LAYOUTS = {
    "1": ((1,), ("data",), "data"),
    "8": ((8,), ("data",), "data"),
    "4x2-model": ((4, 2), ("data", "model"), "data"),
    "4x2": ((4, 2), ("data", "fsdp"), ("data", "fsdp")),
    "2x2x2": ((2, 2, 2), ("model", "a", "b"), ("b", "a")),
}


def exhaustive(*cases):
    """Parameters of tests that take long."""
    return [pytest.param(*case, marks=EXHAUSTIVE) for case in cases]


def only(mode):
    """Parameters for all modes; those other than `mode` are exhaustive tests."""
    return [mode, *exhaustive(*((x,) for x in MODES if x != mode))]


def make_mesh(layout):
    """Returns a mesh of permuted devices, and the axes over which rows are sharded."""
    shape, names, batch_axes = LAYOUTS[layout]
    devices = np.random.default_rng(0).permutation(jax.devices()[: np.prod(shape)])
    return Mesh(devices.reshape(shape), names), batch_axes


def on(mesh, batch, **options):
    """Returns a batch, or micro-batches, on a mesh."""
    (placed,) = jb.sharding.prefetch_to_mesh([batch], mesh, **options)
    return placed


def make_params(dtype=np.float32):
    rng = np.random.default_rng(0)
    shapes = {
        "embedding": (SYMBOLS, WIDTH),
        "kernel": (WIDTH, WIDTH),
        "bias": (WIDTH,),
        "out": (WIDTH, SYMBOLS),
    }
    return {name: rng.normal(size=s).astype(dtype) for name, s in shapes.items()}


def token_losses(params, tokens, kept=None):
    """Cross entropy of predicting the next of 12 symbols, at every position."""
    hidden = params["embedding"][tokens]
    if kept is not None:
        hidden = hidden * kept.astype(hidden.dtype)
    hidden = jnp.tanh(hidden @ params["kernel"] + params["bias"])
    return optax.softmax_cross_entropy_with_integer_labels(
        hidden @ params["out"], (tokens + 1) % SYMBOLS
    )


def make_examples(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [
        {"tokens": rng.integers(0, SYMBOLS, n, np.int32), "label": np.int32(label)}
        for label, n in enumerate(lengths)
    ]


def recorder():
    """An optimizer that changes nothing and keeps the last gradient as its state."""

    def update(updates, state, params=None):
        return jax.tree.map(jnp.zeros_like, updates), updates

    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params), update
    )


def assert_close(got, want, limit):
    """Asserts that the relative distance of each tensor is below a limit."""

    def assert_near(got, want):
        assert got.dtype == want.dtype and np.linalg.norm(want) > 0
        assert np.linalg.norm(got - want) / np.linalg.norm(want) < limit

    jax.tree.map(lambda *x: assert_near(*map(np.asarray, x)), got, want)
