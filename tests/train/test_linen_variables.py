"""Initial variables of Linen modules: which they are, and alike in all processes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

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
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("kind", ["", "remat", "jit", "vmap"])
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


def test_a_numpy_bool_is_a_python_value():
    state = jb.create_state(Router(), sample=(X, np.bool_(True)))
    assert "Dense_0" in state.params


class ByName(linen.Module):
    @linen.compact
    def __call__(self, x, *, train):
        return linen.Dense(1)(x)


@pytest.mark.parametrize("sample", [X, (X, True), (X, {"train": True})])
def test_a_sample_that_does_not_fit_is_refused(sample):
    message = r"`sample` does not fit `ByName.__call__`: .*`variables = module.init\("
    with pytest.raises(ValueError, match=message):
        jb.create_state(ByName(), sample=sample)


KEY = jax.random.key(0)


@pytest.mark.parametrize(
    "rngs", [0, nnx.Rngs(0), {"dropout": KEY}, {"params": 0}, jax.random.split(KEY)]
)
def test_values_that_are_not_keys_are_refused(rngs):
    with pytest.raises(ValueError, match="`rngs` is a .*, neither a random key nor"):
        jb.create_state(linen.Dense(1), sample=X, rngs=rngs)


def test_old_and_new_keys_initialize_alike():
    states = [
        jb.create_state(linen.Dense(1), sample=X, rngs=rngs)
        for rngs in (KEY, jax.random.PRNGKey(0), {"params": np.zeros(2, np.uint32)})
    ]
    for state in states[1:]:
        jax.tree.map(np.testing.assert_array_equal, state.params, states[0].params)


@pytest.mark.parametrize(
    ("axis", "message"),
    [
        ("model", r"`model` shards .*kernel.* over \['model'\], but the mesh has axes"),
        ("data", "of shape .3, 6., into 4 parts, which do not divide 6"),
    ],
)
def test_a_sharding_that_does_not_fit_the_mesh_is_refused(axis, message):
    init = linen.with_partitioning(linen.initializers.ones, (None, axis))
    with pytest.raises(ValueError, match=message):
        jb.create_state(
            linen.Dense(6, kernel_init=init),
            mesh=jb.data_mesh(jax.devices()[:4]),
            sample=X,
        )


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
        lambda: jb.create_state(linen.Dense(1), mesh=mesh, sample=x[index:]),
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
        except ValueError as error:
            record(error)
"""


@pytest.mark.exhaustive
def test_processes_that_initialize_differently_are_refused(launch):
    launched = launch(DIFFERENT)
    assert launched.status == 0, launched.output
    for index in range(2):
        rngs, sample, model, same, *traced, shape = launched.recorded(index)
        start = "of process 1 differs from that of process 0."
        assert rngs.startswith(f"`rngs` {start}")
        assert sample.startswith(f"`sample` {start}")
        assert model.startswith(f"`model` {start}")
        assert [same, *traced] == ["0"] * 3
        assert "ShapeDtypeStruct" in shape
