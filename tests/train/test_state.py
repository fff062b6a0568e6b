"""States of Linen, NNX and plain models: initialization and selection."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState as FlaxTrainState
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from step_cases import on

import jaxbucket as jb

# Parts of optax and Flax mix dtypes.
pytestmark = pytest.mark.usefixtures("standard_promotion")

FEATURES = 3
ONE = jb.data_mesh(jax.devices()[:1])
BATCH = jb.data.collate_rows([{"x": np.ones(2, np.float32)}], jb.Bucket(1, 2))


class Normalizing(linen.Module):
    @linen.compact
    def __call__(self, x, mask, train=False):
        return linen.BatchNorm()(linen.Dense(8)(x), not train, mask=mask[..., None])


def test_a_linen_module_is_initialized_like_by_itself():
    mesh, key = jb.data_mesh(), jax.random.key(3)
    sample = np.ones((8, 5, FEATURES), np.float32), np.ones((8, 5), bool)
    state = jb.create_state(
        Normalizing(), optax.adam(1.0), mesh, sample=sample, rngs=key
    )
    expected = dict(Normalizing().init(key, *sample))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), state.model, expected
    )
    assert all(x.sharding.mesh == mesh for x in jax.tree.leaves(state))


def test_a_batch_may_be_the_sample_of_a_module():
    class OfBatch(linen.Module):
        @linen.compact
        def __call__(self, batch):
            return linen.Dense(2)(batch.features["x"])

    plan = jb.BucketPlan.from_shapes([(8, 4)])
    example = {"x": np.ones((3, FEATURES), np.float32)}
    (spec,) = jb.sharding.batch_specs(plan, example, jb.data_mesh()).values()
    state = jb.create_state(OfBatch(), sample=spec, rngs={"params": jax.random.key(0)})
    assert state.params["Dense_0"]["kernel"].shape == (FEATURES, 2)
    assert state.opt_state == ()


def test_a_partitioned_linen_module_is_sharded():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    kernel = linen.with_partitioning(linen.initializers.ones, (None, "model"))
    state = jb.create_state(
        linen.Dense(8, kernel_init=kernel),
        optax.adam(1.0),
        mesh,
        sample=jax.ShapeDtypeStruct((1, FEATURES), np.float32),
    )
    sharded = NamedSharding(mesh, PartitionSpec(None, "model"))
    moments = state.opt_state[0].mu["kernel"]
    assert state.params["kernel"].sharding == moments.sharding == sharded
    assert state.params["bias"].sharding.is_fully_replicated


def test_a_sample_may_have_random_keys():
    class Noisy(linen.Module):
        @linen.compact
        def __call__(self, x, keys):
            noise = jax.vmap(lambda key: jax.random.normal(key, (3,)))(keys)
            return linen.Dense(2)(x + noise)

    keys = jax.random.split(jax.random.key(0), 4)
    sample = np.ones((4, 3), np.float32), keys
    state = jb.create_state(Noisy(), sample=sample)
    specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), sample)
    same = jb.create_state(Noisy(), sample=specs)
    jax.tree.map(np.testing.assert_array_equal, state.params, same.params)


def test_a_state_owns_its_arrays():
    """Steps donate them, so that they may be neither shared nor the user's."""
    w = jnp.ones(3)
    states = [
        jb.create_state({"a": w, "b": w}, optax.sgd(0.1), variables={"old": {"a": w}}),
    ]
    states.append(jb.create_state(states[0], optax.sgd(0.1)))

    def loss_fn(model, batch, keys):
        return jnp.sum(model["params"]["a"] + model["params"]["b"]), batch.num_tokens

    step = jb.make_train_step(loss_fn, optax.sgd(0.1), ONE)
    for state in states:
        new, _ = step(state, BATCH)
        assert new.params["a"][0] < 1 and new.params["b"][0] < 1
    assert w.tolist() == [1, 1, 1]


class Normalized(nnx.Module):
    def __init__(self):
        self.norm = nnx.BatchNorm(1, rngs=nnx.Rngs(0))


W = {"w": 1.0}
FLAX_STATE = FlaxTrainState.create(
    apply_fn=None, params={"w": jnp.ones(1)}, tx=optax.sgd(0.1)
)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("sample", lambda: jb.create_state(linen.Dense(3))),
        ("sample", lambda: jb.create_state(W, sample=np.ones(3))),
        ("rngs", lambda: jb.create_state(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), rngs=0)),
        ("rngs", lambda: jb.create_state(jb.create_state(W), rngs=0)),
        ("variables", lambda: jb.create_state(linen.Dense(3), variables={"a": {}})),
        ("variables", lambda: jb.create_state(W, variables={"params": {}})),
        ("tx", lambda: jb.create_state(W, jb.data_mesh())),
        ("mesh", lambda: jb.create_state(W, optax.sgd(0.1), jax.devices())),
        ("wrt", lambda: jb.create_state(W, wrt=nnx.PathContains("head"))),
        *(
            (
                "model",
                lambda x=x, y=sample: jb.create_state(x, optax.sgd(0.1), sample=y),
            )
            for x, sample in (
                (linen.Sequential([linen.relu]), np.ones(3)),
                (linen.Dense, None),
                (None, None),
                (lambda x: x, None),
                ({"net": Normalized()}, None),
                ([Normalized()], None),
                (nnx.state(Normalized()), None),
                (nnx.Optimizer(Normalized(), optax.sgd(0.1), wrt=nnx.Param), None),
                (FLAX_STATE, None),
                ({"params": {"w": jnp.ones(1)}, "counters": {}}, None),
                ({"w": jnp.ones(1), "n": np.int32(3)}, None),
            )
        ),
    ],
)
def test_wrong_arguments_are_refused(name, make):
    with pytest.raises(ValueError, match=f"`{name}[=`]"):
        make()


def test_scales_in_fp8_are_refused():
    dense = linen.Dense(8, dot_general_cls=linen.Fp8DirectDotGeneralOp)
    with pytest.raises(ValueError, match="`model` has .*fp8"):
        jb.create_state(dense, sample=np.ones((4, 8), np.float32))


# A second phase


@pytest.mark.parametrize("kind", ["nnx", "linen", "plain"])
def test_a_second_phase_continues_with_the_model(kind):
    mesh, tx = jb.data_mesh(jax.devices()[:2]), optax.sgd(0.1)
    if kind == "nnx":
        first = jb.create_state(nnx.BatchNorm(3, rngs=nnx.Rngs(0)), tx, mesh)
    elif kind == "linen":
        sample = np.ones((2, 3), np.float32)
        module = linen.BatchNorm(use_running_average=False)
        first = jb.create_state(module, tx, mesh, sample=sample)
    else:
        params = {"scale": np.ones(3), "bias": np.zeros(3)}
        first = jb.create_state(params, tx, mesh)
    first = dataclasses.replace(
        first,
        step=first.step + 7,
        **{
            name: jax.tree.map(lambda x: x + 1, getattr(first, name))
            for name in ("params", "variables")
        },
    )
    second = jb.create_state(
        first, optax.adam(0.1), mesh, wrt=nnx.PathContains("scale")
    )
    assert second.step == 0
    (scale,) = jax.tree.leaves(second.params)
    assert scale.tolist() == [2, 2, 2]

    def leaves(model):
        return jax.tree.leaves(nnx.state(model) if kind == "nnx" else model)

    for ours, theirs in zip(leaves(second.model), leaves(first.model), strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert ours is not theirs


def test_steps_refuse_a_state_of_another_library():
    for step in (
        jb.make_train_step(times(1.0), optax.sgd(0.1), ONE),
        jb.make_eval_step(times(1.0), ONE),
        jb.make_predict_step(lambda model, batch: {}, ONE),
    ):
        with pytest.raises(ValueError, match="`state`"):
            step(FLAX_STATE, BATCH)


# Training a part of the parameters


class Stack(nnx.Module):
    def __init__(self, rngs):
        layers = [nnx.Linear(64, 64, rngs=rngs) for _ in range(4)]
        self.body, self.head = nnx.List(layers), nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, x):
        for layer in self.body:
            x = jnp.tanh(layer(x))
        return self.head(x)


def make_stack(wrt):
    """A deep model of which `wrt` selects the parameters to train, and its step."""

    def loss_fn(model, batch, keys):
        y = model(batch.features["x"])[..., 0]
        return jnp.sum(jnp.square(y), where=batch.mask), batch.num_tokens

    tx = optax.adam(1e-3)
    state = jb.create_state(Stack(nnx.Rngs(0)), tx, ONE, wrt=wrt)
    return state, jb.make_train_step(loss_fn, tx, ONE)


def test_only_selected_parameters_are_trained_and_paid_for():
    x = np.ones((8, 64), np.float32)
    batch = on(ONE, jb.data.collate_rows([{"x": x}] * 4, jb.Bucket(4, 8)))

    def costs(step, state):
        compiled = step.lower(state, batch).compile()
        memory = compiled.memory_analysis().temp_size_in_bytes
        return compiled.cost_analysis()["flops"], memory

    state, step = make_stack(nnx.All(nnx.Param, nnx.PathContains("head")))
    whole, whole_step = make_stack(None)
    flops, memory = costs(step, state)
    whole_flops, whole_memory = costs(whole_step, whole)
    # Without gradients of the body, only its forward pass is left: a third.
    assert flops < 0.45 * whole_flops
    # Neither the gradients of the body nor its activations are kept.
    assert memory < 0.5 * whole_memory
    sizes = [sum(x.size for x in jax.tree.leaves(s.opt_state)) for s in (state, whole)]
    assert sizes[0] < 0.02 * sizes[1]
    before = jax.tree.map(np.array, (state.params, state.frozen))
    state, _ = step(state, batch)
    after = jax.tree.map(np.array, (state.params, state.frozen))
    jax.tree.map(np.testing.assert_array_equal, after[1], before[1])
    assert all(
        (a != b).any()
        for a, b in zip(*map(jax.tree.leaves, (after[0], before[0])), strict=True)
        if a.size > 1
    )


def test_a_path_and_a_value_select_parameters():
    params = {"a": [np.ones(2), np.ones((2, 2))], "b": {"c": np.ones(3)}}
    seen = []

    def is_matrix(path, value):
        seen.append(path)
        return value.ndim == 2

    state = jb.create_state(params, optax.sgd(1.0), wrt=is_matrix)
    assert seen == [("a", 0), ("a", 1), ("b", "c")]
    assert [x.shape for x in jax.tree.leaves(state.params)] == [(2, 2)]
    jax.tree.map(np.testing.assert_array_equal, state.model, params)


def times(factor):
    return lambda params, batch, keys: (params["w"] * factor, batch.num_tokens)


# The optimizer of the state and that of the step


SGD, MOMENTUM = optax.sgd(0.1), optax.sgd(0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("of_state", "of_step"),
    [
        (MOMENTUM, SGD),
        (SGD, MOMENTUM),
        (None, MOMENTUM),
    ],
)
def test_a_step_refuses_the_state_of_another_optimizer(of_state, of_step):
    step = jb.make_train_step(times(1.0), of_step, ONE)
    with pytest.raises(ValueError, match="`state`"):
        step(jb.create_state({"w": 1.0}, of_state, ONE), BATCH)


@pytest.mark.parametrize(
    "init",
    [
        lambda w: jnp.float32(max(float(x) for x in jax.tree.leaves(w))),
        lambda w: jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), w
        ),
    ],
)
def test_the_initial_state_may_depend_on_values_and_shardings(init):
    tx = optax.GradientTransformation(init, lambda grads, state, params: (grads, state))
    state = jb.create_state({"w": 1.0}, tx, ONE)
    expected = jax.tree.map(float, state.opt_state)
    state, _ = jb.make_train_step(times(1.0), tx, ONE)(state, BATCH)
    assert jax.tree.map(float, state.opt_state) == expected


def test_a_filter_that_selects_nothing_shows_paths():
    class Blocks(nnx.Module):
        def __init__(self):
            self.blocks = nnx.List([nnx.Linear(1, 1, rngs=nnx.Rngs(0))])

    with pytest.raises(ValueError, match=r"first paths are \('blocks', 0, 'bias'\), "):
        jb.create_state(Blocks(), optax.sgd(0.1), wrt=nnx.PathContains("0"))
    state = jb.create_state(
        Blocks(), optax.sgd(0.1), wrt=lambda path, _: path[:2] == ("blocks", 0)
    )
    assert len(jax.tree.leaves(state.params)) == 2
