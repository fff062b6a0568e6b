"""Variables that losses change: whole batches, micro-batches, skipped updates."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import Mesh
from step_cases import on

import jaxbucket as jb

# Four devices with two rows each, the last one without an example.
ROWS = [[1.0, 5.0], [2.0], [7.0], [3.0, 4.0, 4.0], [6.0], [1.0], [2.0]]

PADDED = jb.data.collate_rows(
    [{"x": np.array(row, np.float32)} for row in ROWS], jb.Bucket(8, 4)
)
MESH, TX = jb.data_mesh(jax.devices()[:4]), optax.sgd(0.1)
BATCH = on(MESH, PADDED)


def counting_loss(model, batch, keys):
    """Counts tokens, and moves an average towards the mean of the numbers."""
    x, real = batch.features["x"], batch.mask
    level = 0.5 * model["level"]["x"] + 0.5 * jnp.mean(x, where=real)
    new = {
        "total": {"count": model["total"]["count"] + batch.num_tokens},
        "level": {"x": level},
    }
    loss = model["params"]["w"] * jnp.sum(x, where=real)
    return loss, batch.num_tokens, {}, new


VARIABLES = {"total": {"count": np.int32(10)}, "level": {"x": np.float32(8)}}


def make_state(tx=TX, variables=VARIABLES):
    return jb.create_state({"w": np.float32(2)}, tx, MESH, variables=variables)


def step_once(loss, *, variables=VARIABLES, batches=BATCH, **options):
    step = jb.make_train_step(loss, TX, MESH, **options)
    return step(make_state(variables=variables), batches)[0]


def test_collections_have_the_values_that_the_loss_returns():
    state = step_once(counting_loss)
    assert state.variables["total"]["count"] == 10 + 10
    mean = np.concatenate(ROWS).mean()
    np.testing.assert_allclose(state.variables["level"]["x"], 4 + mean / 2, rtol=1e-6)
    assert float(state.params["w"]) != 2


@pytest.mark.parametrize("ahead", [False, True])
def test_a_micro_batch_sees_the_variables_of_the_one_before(ahead):
    state = make_state()
    step = jb.make_train_step(counting_loss, TX, MESH, accumulate=True)
    # The statistics of a batch without examples are not finite.
    empty = jax.tree.map(jnp.zeros_like, BATCH)
    if ahead:
        plan = jb.BucketPlan.from_shapes([(8, 4)])
        specs = jb.sharding.batch_specs(plan, {"x": np.ones(1, np.float32)}, MESH)
        step = jb.compile_steps(step, state, specs, progress=False)
    for number in (1, 2):
        state, _ = step(state, (BATCH, empty, BATCH))
        assert state.variables["total"]["count"] == 10 + 2 * number * 10
    level = 8.0
    for _ in range(4):
        level = 0.5 * level + 0.5 * np.concatenate(ROWS).mean()
    np.testing.assert_allclose(state.variables["level"]["x"], level, rtol=1e-6)
    assert np.isfinite(state.params["w"])


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_skipped_update_keeps_the_variables(accumulate):
    def infinite(model, batch, keys):
        loss, weight, sums, new = counting_loss(model, batch, keys)
        return loss * jnp.inf, weight, sums, new

    batches = (BATCH, BATCH) if accumulate else BATCH
    state = step_once(
        infinite, batches=batches, skip_nonfinite=True, accumulate=accumulate
    )
    assert jax.tree.map(np.asarray, state.variables) == VARIABLES
    assert state.step == 1


@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
def test_a_change_needs_the_whole_batch(mode):
    with pytest.raises(ValueError, match=r"\['level'\]\['x'\].*`mode='jit'`"):
        step_once(counting_loss, mode=mode)


def returning(new):
    def loss(model, batch, keys):
        total = model["params"]["w"] * jnp.sum(batch.features["x"])
        return total, batch.num_tokens, {}, new

    return loss


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ({"memory": {"x": jnp.ones(())}}, r"\['memory'\]\['x'\]"),
        ({"level": {"x": jnp.ones(3)}}, r"\['level'\]\['x'\] from float32"),
        ({"level": {"x": jnp.ones((), jnp.int32)}}, "to int32"),
    ],
)
def test_variables_that_break_the_contract_are_refused(new, message):
    with pytest.raises(ValueError, match=message):
        step_once(returning(new))


def test_weakly_typed_variables_are_compiled_once():
    state = make_state()
    step = jb.make_train_step(returning({"level": {"x": 1.0}}), TX, MESH)
    with jb.compile.count_compiles() as compiles:
        for _ in range(3):
            state, _ = step(state, BATCH)
    assert compiles["train_step"] == 1
    assert state.variables["level"]["x"] == 1


def test_unchanged_variables_may_be_returned_in_evaluation():
    def loss(model, batch, keys):
        new = {name: model[name] for name in VARIABLES}
        return jnp.sum(batch.features["x"]), batch.num_tokens, {}, new

    metrics = jb.make_eval_step(loss, MESH)(make_state(None), BATCH)
    assert metrics["loss_sum"] == 35


def test_a_loss_that_does_not_return_batch_statistics_is_reported():
    stats = {"batch_stats": {"mean": np.float32(3)}}

    def loss(model, batch, keys):
        return model["params"]["w"] * jnp.sum(batch.features["x"]), batch.num_tokens

    with pytest.warns(UserWarning, match="does not return the batch statistics"):
        step_once(loss, variables=stats)
    state = step_once(returning({}), variables=stats)
    assert state.variables["batch_stats"]["mean"] == 3


def test_variables_as_third_value_are_refused():
    def loss(model, batch, keys):
        return *counting_loss(model, batch, keys)[:2], {"total": model["total"]}

    with pytest.raises(ValueError, match="returned 'total'"):
        step_once(loss)


# NNX models


class Counter(nnx.Variable):
    pass


class Counting(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(()))
        self.calls = Counter(jnp.zeros((), jnp.int32))

    def __call__(self, batch):
        self.calls[...] += batch.num_tokens
        return self.w.get_value() * jnp.sum(batch.features["x"], where=batch.mask)


def nnx_loss(model, batch, keys):
    return model(batch), batch.num_tokens


def test_the_variables_of_an_nnx_model_are_those_it_has_assigned():
    model = Counting()
    state = jb.create_state(model, TX, MESH)
    step = jb.make_train_step(nnx_loss, TX, MESH)
    for number in (1, 2):
        state, _ = step(state, BATCH)
        assert state.model.calls.get_value() == number * 10
    # The original model is not changed.
    assert model.calls.get_value() == 0


def test_changes_of_an_nnx_model_are_refused_where_they_would_be_lost():
    def predict(model, batch):
        return {"y": model(batch) + batch.features["x"]}

    def returned(model, batch, keys):
        return *nnx_loss(model, batch, keys), {}, {"calls": jnp.ones(())}

    for step in (
        jb.make_train_step(nnx_loss, TX, MESH, mode="shard_map"),
        jb.make_eval_step(nnx_loss, MESH),
        jb.make_predict_step(predict, MESH),
        jb.make_train_step(returned, TX, MESH),
    ):
        with pytest.raises(ValueError, match="calls|returned variables of an NNX"):
            step(jb.create_state(Counting(), TX, MESH), BATCH)


class Teacher(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(()))
        self.teacher = nnx.Param(jnp.zeros(()))


@pytest.mark.parametrize("wrt", [None, nnx.PathContains("w")])
def test_an_assigned_parameter_is_refused(wrt):
    def loss(model, batch, keys):
        model.teacher[...] = 0.9 * model.teacher[...] + 0.1 * model.w[...]
        return jnp.sum(model.w[...] * batch.features["x"]), batch.num_tokens

    for step in (jb.make_train_step(loss, TX, MESH), jb.make_eval_step(loss, MESH)):
        with pytest.raises(ValueError, match=r"changes \['teacher'\]"):
            step(jb.create_state(Teacher(), TX, MESH, wrt=wrt), BATCH)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jnp.float32(2))
        self.norm = nnx.BatchNorm(1, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    @nnx.remat
    def __call__(self, x):
        return self.drop(self.norm(x * self.w))


def block_loss(model, batch, keys):
    y = model(batch.features["x"][..., None])[..., 0]
    return jnp.sum(y, where=batch.mask), batch.num_tokens


def test_variables_that_a_checkpointed_layer_passes_on_are_unchanged():
    model = Block(nnx.Rngs(0))
    evaluate = jb.make_eval_step(block_loss, MESH, mode="shard_map")
    train = jb.make_train_step(block_loss, TX, MESH, mode="shard_map")
    for step in (evaluate, train):
        with pytest.raises(ValueError, match="The model changes"):
            step(jb.create_state(model, TX, MESH), BATCH)
    model.eval()
    metrics = evaluate(jb.create_state(model, TX, MESH), BATCH)
    np.testing.assert_allclose(metrics["loss"], 7, rtol=1e-4)
    train(jb.create_state(model, TX, MESH), BATCH)


# Batch normalization by Flax's own layers

# Shape of the mesh, its axes, and those over which rows are sharded.
LAYOUTS = {
    "4": ((4,), ("data",), "data"),
    "2x2x2": ((2, 2, 2), ("data", "model", "fsdp"), ("data", "fsdp")),
}


class Normalized(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.float32(0.01))
        self.norm = nnx.BatchNorm(1, momentum=0.5, rngs=nnx.Rngs(0))


class LinenNormalized(linen.Module):
    @linen.compact
    def __call__(self, x, mask):
        w = self.param("w", lambda key: jnp.float32(0.01))
        norm = linen.BatchNorm(momentum=0.5, name="norm")
        return norm((w * x)[..., None], False, mask=mask[..., None])


def norm_loss(model, batch, keys):
    """Squares after batch normalization of `w * x`, which pull `w` to zero."""
    x, mask, new = batch.features["x"], batch.mask, ()
    if isinstance(model, nnx.Module):
        y = model.norm((model.w * x)[..., None], mask=mask[..., None])
    else:
        y, new = LinenNormalized().apply(model, x, mask, mutable=["batch_stats"])
        new = ({}, new)
    loss = jnp.sum(jnp.square(y - 0.5)[..., 0], where=mask)
    return loss, batch.num_tokens, *new


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_batch_normalization_is_that_of_the_whole_batch(kind, layout):
    """The gradient passes through the statistics, to the rows of all devices."""
    shape, names, axes = LAYOUTS[layout]
    mesh = Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), names)
    tx = optax.sgd(1.0)
    if kind == "nnx":
        state = jb.create_state(Normalized(), tx, mesh)
    else:
        sample = (PADDED.features["x"], PADDED.mask)
        state = jb.create_state(LinenNormalized(), tx, mesh, sample=sample)
    step = jb.make_train_step(norm_loss, tx, mesh, batch_axes=axes)
    state, metrics = step(state, on(mesh, PADDED, batch_axes=axes))

    def plain(w, scale, bias):
        y = w * jnp.concatenate([jnp.array(row, jnp.float32) for row in ROWS])
        y = (y - y.mean()) / jnp.sqrt(y.var() + 1e-5) * scale + bias
        return jnp.mean(jnp.square(y - 0.5))

    loss, grads = jax.value_and_grad(plain, argnums=(0, 1, 2))(
        jnp.float32(0.01), jnp.float32(1), jnp.float32(0)
    )
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    if kind == "nnx":
        new = state.model
        w, scale, bias, mean = new.w, new.norm.scale, new.norm.bias, new.norm.mean
    else:
        params, stats = state.model["params"], state.model["batch_stats"]
        w, mean = params["w"], stats["norm"]["mean"]
        scale, bias = params["norm"]["scale"], params["norm"]["bias"]
    got = w - 0.01, scale[0] - 1, bias[0]
    np.testing.assert_allclose(got, -np.array(grads), rtol=1e-3)
    expected = 0.5 * 0.01 * np.concatenate(ROWS).mean()
    np.testing.assert_allclose(mean[0], expected, rtol=1e-5)
