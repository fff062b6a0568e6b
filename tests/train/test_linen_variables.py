"""Initial variables of Linen modules: which they are, and alike in all processes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import jaxbucket as jb

pytestmark = pytest.mark.usefixtures("standard_promotion")

X = np.ones((2, 3), np.float32)


class Router(linen.Module):
    """Records a loss of its router, and normalizes its input."""

    @linen.compact
    def __call__(self, x, train):
        x = linen.Dense(2)(x)
        x = linen.BatchNorm(use_running_average=not train)(x)
        self.sow(
            *("losses", "balance", jnp.float32(5)),
            reduce_fn=lambda a, b: a + b,
            init_fn=lambda: jnp.float32(0),
        )
        self.sow("intermediates", "x", x)
        return self.perturb("x", x)


class Wrapped(linen.Module):
    kind: str

    @linen.compact
    def __call__(self, x, train):
        if self.kind == "remat":
            return linen.remat(Router, static_argnums=2)()(x, train)
        if self.kind == "jit":
            return linen.jit(Router, static_argnums=2)()(x, train)
        vmapped = linen.vmap(
            Router,
            variable_axes={True: 0},
            split_rngs={"params": True},
            in_axes=(0, None),
        )
        return vmapped()(x[None], train)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "train"), [("", False), ("remat", True), ("jit", False), ("vmap", True)]
)
def test_recorded_values_are_not_variables(kind, train):
    module = Wrapped(kind) if kind else Router()
    state = jb.create_state(module, sample=(X, train))
    assert state.variables.keys() == {"batch_stats"}
    _, new = module.apply(state.model, X, True, mutable=["batch_stats", "losses"])
    assert {float(x.sum()) for x in jax.tree.leaves(new["losses"])} == {5}


class Guarded(linen.Module):
    """Counts its calls, if it may."""

    @linen.compact
    def __call__(self, x):
        if self.is_mutable_collection("counters"):
            count = self.variable("counters", "n", lambda: jnp.zeros((), jnp.int32))
            if not self.is_initializing():
                count.value += 1
        return linen.Dense(1)(x)


class PutsItsOwn(linen.Module):
    @linen.compact
    def __call__(self, x):
        if self.is_initializing():
            self.put_variable("scales", "largest", jnp.ones(()))
        return linen.Dense(1)(x) * self.get_variable("scales", "largest")


@pytest.mark.parametrize(
    ("module", "variables"),
    [
        (Guarded(), {"counters": {"n": 0}}),
        (PutsItsOwn(), {"scales": {"largest": 1}}),
    ],
)
def test_all_other_variables_are_kept(module, variables):
    assert jb.create_state(module, sample=X).variables == variables


KEY = jax.random.key(0)


def test_old_and_new_keys_initialize_alike():
    states = [
        jb.create_state(linen.Dense(1), sample=X, rngs=rngs)
        for rngs in (KEY, jax.random.PRNGKey(0), {"params": np.zeros(2, np.uint32)})
    ]
    for state in states[1:]:
        jax.tree.map(np.testing.assert_array_equal, state.params, states[0].params)


DIFFERENT = """
import jax, numpy as np, optax
from flax import linen, nnx
import jaxbucket as jb

with jb.Processes() as processes:
    mesh, index = jb.data_mesh(), processes.index
    x = np.ones((2, 3), np.float32)
    for make in (
        lambda: jb.create_state(
            linen.Dense(1), mesh=mesh, sample=x, rngs=jax.random.key(index)
        ),
        lambda: jb.create_state(
            nnx.Linear(1, 1, rngs=nnx.Rngs(index)), mesh=mesh
        ),
        lambda: jb.create_state(linen.Dense(1), mesh=mesh, sample=x + index),
        # Values are not known inside of a trace.
        jax.jit(lambda: jb.create_state({"w": np.ones(3)}, optax.adam(0.1), mesh)),
        jax.jit(lambda: jb.create_state(linen.Dense(1), mesh=mesh, sample=x)),
        lambda: jax.eval_shape(lambda: jb.create_state({"w": np.ones(3)}, mesh=mesh)),
    ):
        try:
            record(make().step)
        except (AssertionError, ValueError) as error:
            record(str(error).splitlines()[0])
"""


@pytest.mark.exhaustive
def test_processes_that_initialize_differently_are_refused(launch):
    launched = launch(DIFFERENT)
    assert launched.status == 0, launched.output
    for index in range(2):
        rngs, model, same, *traced, shape = launched.recorded(index)
        assert "not the same on each process" in rngs
        assert "not the same on each process" in model
        assert [same, *traced] == ["0"] * 3
        assert "ShapeDtypeStruct" in shape
