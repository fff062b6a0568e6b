"""Variables that losses change: rules over devices, micro-batches, skipped updates."""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import Mesh

import jaxbucket as jb

MODES = ["jit", "shard_map", "pmap"]
QUICK_MODES = [pytest.param("jit", marks=pytest.mark.exhaustive), "shard_map", "pmap"]
RULES = {"total": "sum", "peak": "max", "level": "mean", "seen": "first"}
# Four devices with two rows each, the last one without an example.
ROWS = [[1.0, 5.0], [2.0], [7.0], [3.0, 4.0, 4.0], [6.0], [1.0], [2.0]]


def make_variables():
    return {
        "total": {"count": np.int32(10), "sum": np.float32(100)},
        "peak": {"x": np.float32(-1)},
        "level": {"x": np.float32(8)},
        "seen": {"flag": np.zeros((), bool)},
    }


def loss_fn(model, batch, keys):
    """Counts, sums, and averages the numbers of the rows it is given."""
    x, real = batch.features["x"], batch.mask
    new = {
        "total": {
            "count": model["total"]["count"] + batch.num_tokens,
            "sum": model["total"]["sum"] + jnp.sum(x, where=real),
        },
        "peak": {"x": jnp.maximum(model["peak"]["x"], jnp.max(x))},
        "level": {"x": 0.5 * model["level"]["x"] + 0.5 * jnp.mean(x)},
        "seen": {"flag": jnp.ones((), bool)},
    }
    loss = model["params"]["w"] * jnp.sum(x, where=real)
    return loss, batch.num_tokens, {}, new


def make_batch(rows=ROWS, num_rows=8):
    rows = [{"x": np.array(row, np.float32)} for row in rows]
    return jb.data.collate_rows(rows, jb.Bucket(num_rows, 4))


def on_mesh(batch, mesh):
    return next(iter(jb.sharding.prefetch_to_mesh([batch], mesh)))


def step_once(
    loss, *, mode="jit", num_devices=4, variables=None, rules=None, **options
):
    mesh, tx = jb.data_mesh(jax.devices()[:num_devices]), optax.sgd(0.1)
    variables = make_variables() if variables is None else variables
    state = jb.create_state({"w": np.float32(2)}, tx, mesh, variables=variables)
    step = jb.make_train_step(
        loss, tx, mesh, mode=mode, variable_rules=rules, **options
    )
    batch = on_mesh(make_batch(), mesh)
    return step(state, (batch, batch) if options.get("accumulate") else batch)[0]


@pytest.mark.parametrize("mode", MODES)
def test_values_of_devices_are_combined_by_their_rules(mode):
    state = step_once(loss_fn, mode=mode, rules=RULES)
    new = jax.tree.map(np.asarray, state.variables)
    assert new["total"] == {"count": 10 + 10, "sum": 100 + 35}
    assert new["peak"]["x"] == 7
    assert new["seen"]["flag"]
    rows = np.asarray(make_batch().features["x"])
    np.testing.assert_allclose(new["level"]["x"], 4 + 0.5 * rows.mean(), rtol=1e-6)
    assert float(state.params["w"]) != 2


@pytest.mark.parametrize("mode", MODES)
def test_the_value_of_the_first_device_is_taken(mode):
    def of_first_row(model, batch, keys):
        new = {"seen": {"x": batch.features["x"][0, 0]}}
        loss = model["params"]["w"] * jnp.sum(batch.features["x"])
        return loss, batch.num_tokens, {}, new

    state = step_once(
        of_first_row,
        mode=mode,
        variables={"seen": {"x": np.float32(0)}},
        rules={"seen": "first"},
    )
    assert state.variables["seen"]["x"] == 1


@pytest.mark.parametrize("mode", MODES)
def test_random_keys_are_those_of_the_first_device(mode):
    def loss(model, batch, keys):
        key = jax.random.fold_in(model["key"]["x"], batch.num_tokens)
        return model["params"]["w"] * 0.0, batch.num_tokens, {}, {"key": {"x": key}}

    key = jax.random.key(3)
    variables = {"key": {"x": key}}
    state = step_once(loss, mode=mode, variables=variables, rules={"key": "first"})
    # The first of four devices has two of the eight rows.
    rows = ROWS if mode == "jit" else ROWS[:2]
    expected = jax.random.fold_in(key, sum(map(len, rows)))
    assert np.all(state.variables["key"]["x"] == expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ahead", [False, True])
def test_a_micro_batch_sees_the_variables_of_the_one_before(mode, ahead):
    mesh, tx = jb.data_mesh(jax.devices()[:4]), optax.sgd(0.1)
    state = jb.create_state({"w": np.float32(2)}, tx, mesh, variables=make_variables())
    step = jb.make_train_step(
        loss_fn, tx, mesh, mode=mode, accumulate=True, variable_rules=RULES
    )
    batch = on_mesh(make_batch(), mesh)
    if ahead:
        plan = jb.BucketPlan.from_shapes([(8, 4)])
        specs = jb.sharding.batch_specs(plan, {"x": np.ones(1, np.float32)}, mesh)
        step = jb.compile_steps(step, state, specs, progress=False)
    for number in (1, 2):
        state, _ = step(state, (batch, batch))
        assert state.variables["total"]["count"] == 10 + 2 * number * 10
    mean = np.asarray(make_batch().features["x"]).mean()
    level = 8.0
    for _ in range(4):
        level = 0.5 * level + 0.5 * mean
    np.testing.assert_allclose(state.variables["level"]["x"], level, rtol=1e-6)


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_skipped_update_keeps_the_variables(accumulate):
    def infinite(model, batch, keys):
        loss, weight, sums, new = loss_fn(model, batch, keys)
        return loss * jnp.inf, weight, sums, new

    state = step_once(infinite, rules=RULES, skip_nonfinite=True, accumulate=accumulate)
    expected = make_variables()
    assert jax.tree.map(np.asarray, state.variables) == expected
    assert state.step == 1


class Counter(nnx.Variable):
    pass


class SubCounter(Counter):
    pass


class Counting(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(()))
        self.calls = SubCounter(jnp.zeros((), jnp.int32))

    def __call__(self, batch):
        self.calls[...] += batch.num_tokens
        return self.w.get_value() * jnp.sum(batch.features["x"], where=batch.mask)


def nnx_loss(model, batch, keys):
    return model(batch), batch.num_tokens


@pytest.mark.parametrize("mode", MODES)
def test_the_variables_of_an_nnx_model_are_those_it_has_assigned(mode):
    mesh, tx = jb.data_mesh(jax.devices()[:4]), optax.sgd(0.1)
    model = Counting()
    state = jb.create_state(model, tx, mesh)
    step = jb.make_train_step(
        nnx_loss, tx, mesh, mode=mode, variable_rules={Counter: "sum"}
    )
    batch = on_mesh(make_batch(), mesh)
    for number in (1, 2):
        state, _ = step(state, batch)
        assert state.model.calls.get_value() == number * 10
    # The original model is not changed.
    assert model.calls.get_value() == 0


def test_a_change_without_a_rule_is_refused():
    mesh, tx = jb.data_mesh(jax.devices()[:4]), optax.sgd(0.1)
    batch = on_mesh(make_batch(), mesh)
    step = jb.make_train_step(nnx_loss, tx, mesh)
    message = r"changes \['calls'\].* of type SubCounter.*SubCounter: rule"
    with pytest.raises(ValueError, match=message):
        step(jb.create_state(Counting(), tx, mesh), batch)
    message = r"changes \['peak'\]\['x'\], of collection 'peak'.*\{'peak': rule\}"
    with pytest.raises(ValueError, match=message):
        step_once(loss_fn, rules={"total": "sum", "level": "mean"})


def test_a_change_in_evaluation_is_refused():
    mesh = jb.data_mesh(jax.devices()[:4])
    batch = on_mesh(make_batch(), mesh)
    message = r"`loss_fn` changes \['calls'\].*, of type SubCounter, but.* fixed"
    with pytest.raises(ValueError, match=message):
        jb.make_eval_step(nnx_loss, mesh)(
            jb.create_state(Counting(), None, mesh), batch
        )


def test_unchanged_variables_may_be_returned_in_evaluation():
    def loss(model, batch, keys):
        new = {name: model[name] for name in RULES}
        return jnp.sum(batch.features["x"]), batch.num_tokens, {}, new

    mesh = jb.data_mesh(jax.devices()[:4])
    state = jb.create_state(
        {"w": np.float32(2)}, None, mesh, variables=make_variables()
    )
    metrics = jb.make_eval_step(loss, mesh)(state, on_mesh(make_batch(), mesh))
    assert metrics["loss_sum"] == 35


def returning(new):
    def loss(model, batch, keys):
        total = model["params"]["w"] * jnp.sum(batch.features["x"])
        return total, batch.num_tokens, {}, new(model)

    return loss


BROKEN = {
    "a-list": (lambda m: [1], None, "returned variables as list"),
    "unknown": (
        lambda m: {"memory": {"x": jnp.ones(())}},
        None,
        r"returned the variable \['memory'\]\['x'\], which is not among the.*"
        r"\['level', 'peak', 'seen', 'total'\]",
    ),
    "a-shape": (
        lambda m: {"peak": {"x": jnp.ones(3)}},
        None,
        r"changes \['peak'\]\['x'\] from float32\[\] to float32\[3\]",
    ),
    "a-dtype": (
        lambda m: {"peak": {"x": jnp.ones((), jnp.int32)}},
        None,
        r"changes \['peak'\]\['x'\] from float32\[\] to int32\[\]",
    ),
    "the-mean-of-integers": (
        lambda m: {"total": {"count": m["total"]["count"] + 1}},
        {"total": "mean"},
        r"asks for the mean of \['total'\]\['count'\], which is int32",
    ),
    "the-sum-of-bools": (
        lambda m: {"seen": {"flag": ~m["seen"]["flag"]}},
        {"seen": "sum"},
        r"asks for the sum of \['seen'\]\['flag'\], which is bool",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_variables_that_break_the_contract_are_refused(case):
    new, rules, message = BROKEN[case]
    with pytest.raises(ValueError, match=message):
        step_once(returning(new), rules=RULES | (rules or {}))


def test_an_nnx_model_assigns_its_variables():
    def loss(model, batch, keys):
        total, weight = nnx_loss(model, batch, keys)
        return total, weight, {}, {"calls": jnp.ones(())}

    mesh, tx = jb.data_mesh(jax.devices()[:4]), optax.sgd(0.1)
    state = jb.create_state(Counting(), tx, mesh)
    step = jb.make_train_step(loss, tx, mesh, variable_rules={Counter: "sum"})
    with pytest.raises(ValueError, match="returned variables of an NNX model"):
        step(state, on_mesh(make_batch(), mesh))


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("mean", "`variable_rules` is a str"),
        ({3: "mean"}, "`variable_rules` has the key 3"),
        ({int: "mean"}, "`variable_rules` has the key <class 'int'>"),
        ({"stats": "median"}, "the rule 'median' for collection 'stats'. Choose from"),
        ({nnx.BatchStat: None}, "the rule None for type BatchStat"),
    ],
)
def test_rules_are_checked(rules, message):
    with pytest.raises(ValueError, match=message):
        jb.make_train_step(
            loss_fn, optax.sgd(0.1), jb.data_mesh(), variable_rules=rules
        )


# Shape of the mesh, its axes, and those over which rows are sharded.
LAYOUTS = {
    "4": ((4,), ("data",), "data"),
    "2x4": ((2, 4), ("model", "data"), "data"),
    "4x2": ((4, 2), ("data", "model"), "data"),
    "2x2x2": ((2, 2, 2), ("data", "model", "fsdp"), ("data", "fsdp")),
}
# The others are exhaustive tests.
QUICK_LAYOUTS = [
    pytest.param(name, marks=() if name == "2x2x2" else pytest.mark.exhaustive)
    for name in LAYOUTS
]


@pytest.mark.parametrize("layout", QUICK_LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_sums_over_rows_are_those_of_the_whole_batch(mode, layout):
    """Each device has the mean of all rows, and gradients flow back to all of them."""

    def loss(params, batch, keys):
        y = params["w"] * batch.features["x"]
        sums = jnp.sum(y, where=batch.mask), batch.num_tokens.astype(jnp.float32)
        total, count = jb.train.sum_over_rows(sums)
        return jnp.sum(
            jnp.square(y - total / count), where=batch.mask
        ), batch.num_tokens

    shape, names, axes = LAYOUTS[layout]
    mesh = Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), names)
    tx = optax.sgd(1.0)
    state = jb.create_state({"w": np.float32(2)}, tx, mesh)
    step = jb.make_train_step(loss, tx, mesh, mode=mode, batch_axes=axes)
    batches = jb.sharding.prefetch_to_mesh([make_batch()], mesh, batch_axes=axes)
    state, metrics = step(state, next(iter(batches)))
    numbers = np.concatenate(ROWS)
    np.testing.assert_allclose(metrics["loss"], 4 * numbers.var(), rtol=1e-6)
    np.testing.assert_allclose(state.params["w"], 2 - 4 * numbers.var(), rtol=1e-5)


def norm_loss(model, batch, keys):
    """Squares after batch normalization of `w * x`, which pull `w` to zero."""
    y = model.norm((model.w * batch.features["x"])[..., None], mask=batch.mask)
    return jnp.sum(jnp.square(y - 0.5)[..., 0], where=batch.mask), batch.num_tokens


class Normalized(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.float32(0.01))
        self.norm = jb.layers.NnxBatchNorm(1, momentum=0.5, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("layout", QUICK_LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_batch_normalization_is_that_of_the_whole_batch(mode, layout):
    """The gradient passes through the statistics, to the rows of all devices."""
    shape, names, axes = LAYOUTS[layout]
    mesh = Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), names)
    tx = optax.sgd(1.0)
    state = jb.create_state(Normalized(), tx, mesh)
    step = jb.make_train_step(norm_loss, tx, mesh, mode=mode, batch_axes=axes)
    batches = jb.sharding.prefetch_to_mesh([make_batch()], mesh, batch_axes=axes)
    state, metrics = step(state, next(iter(batches)))

    def plain(w, scale, bias):
        y = w * jnp.concatenate([jnp.array(row, jnp.float32) for row in ROWS])
        y = (y - y.mean()) / jnp.sqrt(y.var() + 1e-5) * scale + bias
        return jnp.mean(jnp.square(y - 0.5))

    loss, grads = jax.value_and_grad(plain, argnums=(0, 1, 2))(
        jnp.float32(0.01), jnp.float32(1), jnp.float32(0)
    )
    new = state.model
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    got = new.w - 0.01, new.norm.scale[0] - 1, new.norm.bias[0]
    np.testing.assert_allclose(got, -np.array(grads), rtol=1e-4)
    mean = 0.01 * np.concatenate(ROWS).mean()
    np.testing.assert_allclose(new.norm.mean[0], 0.5 * mean, rtol=1e-5)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jnp.float32(2))
        self.norm = jb.layers.NnxBatchNorm(1, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    @nnx.remat
    def __call__(self, x):
        return self.drop(self.norm(x * self.w))


def block_loss(model, batch, keys):
    y = model(batch.features["x"][..., None])[..., 0]
    return jnp.sum(y, where=batch.mask), batch.num_tokens


def test_variables_that_a_checkpointed_layer_passes_on_are_unchanged():
    mesh, tx = jb.data_mesh(jax.devices()[:4]), optax.sgd(0.1)
    model = Block(nnx.Rngs(0))
    batch = on_mesh(make_batch(), mesh)
    evaluate = jb.make_eval_step(block_loss, mesh)
    predict = jb.make_predict_step(
        lambda model, batch: {"y": model(batch.features["x"][..., None])}, mesh
    )
    for function in (evaluate, predict):
        with pytest.raises(ValueError, match="fixed in evaluation and prediction"):
            function(jb.create_state(model, tx, mesh), batch)
    model.eval()
    predict(jb.create_state(model, tx, mesh), batch)
    metrics = evaluate(jb.create_state(model, tx, mesh), batch)
    np.testing.assert_allclose(metrics["loss"], 7, rtol=1e-4)
    model.train()
    model.drop.deterministic = True
    # The keys of dropout have no rule, and the batch statistics change.
    step = jb.make_train_step(block_loss, tx, mesh)
    state, _ = step(jb.create_state(model, tx, mesh), batch)
    assert state.model.norm.mean[0] != 0


class Teacher(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(()))
        self.teacher = nnx.Param(jnp.zeros(()))


@pytest.mark.parametrize("wrt", [None, nnx.PathContains("w")])
def test_an_assigned_parameter_is_refused(wrt):
    def loss(model, batch, keys):
        model.teacher[...] = 0.9 * model.teacher[...] + 0.1 * model.w[...]
        x = batch.features["x"]
        return jnp.sum(model.w[...] * x), batch.num_tokens

    def predict(model, batch):
        loss(model, batch, None)
        return {"x": batch.features["x"]}

    mesh, tx = jb.data_mesh(jax.devices()[:4]), optax.sgd(0.1)
    batch = on_mesh(make_batch(), mesh)
    for function, step in (
        ("loss_fn", jb.make_train_step(loss, tx, mesh)),
        ("loss_fn", jb.make_eval_step(loss, mesh)),
        ("predict_fn", jb.make_predict_step(predict, mesh)),
    ):
        message = rf"`{function}` assigns \['teacher'\].*, a parameter"
        with pytest.raises(ValueError, match=message):
            step(jb.create_state(Teacher(), tx, mesh, wrt=wrt), batch)


@pytest.mark.parametrize("mode", MODES)
def test_weakly_typed_variables_are_compiled_once(mode):
    def loss(model, batch, keys):
        total = model["params"]["w"] * jnp.sum(batch.features["x"])
        new = {"peak": {"x": jnp.where(total > 0, 1.0, 0.0)}}
        return total, batch.num_tokens, {}, new

    mesh, tx = jb.data_mesh(jax.devices()[:4]), optax.sgd(0.1)
    state = jb.create_state({"w": np.float32(2)}, tx, mesh, variables=make_variables())
    step = jb.make_train_step(loss, tx, mesh, mode=mode, variable_rules=RULES)
    batch = on_mesh(make_batch(), mesh)
    with jb.compile.count_compiles() as compiles:
        for _ in range(3):
            state, _ = step(state, batch)
    assert compiles["train_step"] == 1
    assert state.variables["peak"]["x"] == 1


def test_new_variables_that_are_not_finite_are_skipped():
    def overflow(model, batch, keys):
        loss, weight, sums, new = loss_fn(model, batch, keys)
        return loss, weight, sums, {"level": {"x": new["level"]["x"] * jnp.inf}}

    state = step_once(overflow, rules=RULES, skip_nonfinite=True)
    assert state.variables["level"]["x"] == 8
    assert state.params["w"] == 2


def test_a_loss_that_does_not_return_batch_statistics_is_reported():
    def loss(model, batch, keys):
        return model["params"]["w"] * jnp.sum(batch.features["x"]), batch.num_tokens

    stats = {"batch_stats": {"mean": np.float32(3)}}
    with pytest.warns(UserWarning, match=r"not return the variables \['batch_stats'\]"):
        step_once(loss, variables=stats)
    state = step_once(lambda *args: (*loss(*args), {}, {}), variables=stats)
    assert state.variables["batch_stats"]["mean"] == 3


# Flax's own batch normalization


class FlaxNormalized(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.float32(0.01))
        self.norm = nnx.BatchNorm(1, rngs=nnx.Rngs(0))


def flax_nnx(use_average):
    def loss(model, batch, keys):
        if use_average:
            model.eval()
        y = model.w[...] * batch.features["x"][..., None]
        y = nnx.remat(lambda norm, y: norm(y))(model.norm, y)
        return jnp.sum(y[..., 0], where=batch.mask), batch.num_tokens

    return FlaxNormalized(), loss, {}


def flax_linen(use_average):
    class Module(linen.Module):
        @linen.compact
        def __call__(self, x, train):
            return linen.remat(linen.BatchNorm, static_argnums=2)()(x, not train)

    return Module(), flax_linen_loss(Module(), not use_average), SAMPLE


SAMPLE = {"sample": (np.ones((1, 1, 1), np.float32), True)}


def flax_linen_loss(module, flag):
    def loss(variables, batch, keys):
        x = batch.features["x"][..., None]
        y, new = module.apply(variables, x, flag, mutable=["batch_stats"])
        return jnp.sum(y[..., 0], where=batch.mask), batch.num_tokens, {}, new

    return loss


def flax_inherited(use_average):
    class Inherited(linen.BatchNorm):
        @linen.compact
        def __call__(self, x, use_running_average=None):
            return super().__call__(x, use_running_average)

    class Module(linen.Module):
        @linen.compact
        def __call__(self, x, use_average):
            return Inherited()(x, use_average)

    return Module(), flax_linen_loss(Module(), use_average), SAMPLE


def flax_nested(use_average):
    class Inherited(nnx.BatchNorm):
        pass

    model = nnx.Dict(layers=nnx.List([nnx.Dict(norm=Inherited(1, rngs=nnx.Rngs(0)))]))
    model.layers[0].norm.use_running_average = use_average

    def loss(model, batch, keys):
        y = nnx.merge(*nnx.split(model)).layers[0].norm(batch.features["x"][..., None])
        return jnp.sum(y[..., 0], where=batch.mask), batch.num_tokens

    return model, loss, {}


@pytest.mark.parametrize("mode", QUICK_MODES)
@pytest.mark.parametrize("make", [flax_nnx, flax_linen])
def test_batch_normalization_of_the_rows_of_one_device_is_refused(make, mode):
    tx = optax.sgd(0.1)
    for num_devices, use_average in ((4, False), (4, True), (1, False)):
        mesh = jb.data_mesh(jax.devices()[:num_devices])
        module, loss, options = make(use_average)
        state = jb.create_state(module, tx, mesh, **options)
        step = jb.make_train_step(loss, tx, mesh, mode=mode)
        batch = on_mesh(make_batch(), mesh)
        if mode == "jit" or num_devices == 1 or use_average:
            step(state, batch)
        else:
            with pytest.raises(
                ValueError, match="BatchNorm`, whose statistics are.*mode="
            ):
                step(state, batch)


@pytest.mark.parametrize("make", [flax_inherited, flax_nested])
def test_batch_normalization_is_found_behind_other_classes(make):
    mesh, tx = jb.data_mesh(jax.devices()[:4]), optax.sgd(0.1)
    module, loss, options = make(False)
    state = jb.create_state(module, tx, mesh, **options)
    step = jb.make_train_step(loss, tx, mesh, mode="shard_map")
    with pytest.raises(ValueError, match="BatchNorm`, whose statistics are.*mode="):
        step(state, on_mesh(make_batch(), mesh))


class OwnStatistics(nnx.BatchNorm):
    def __call__(self, x):
        self.mean[...] = jax.lax.pmean(jnp.mean(x, (0, 1)), "data")
        return x - self.mean[...]


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("during", [True, False, None, "unused", "own"])
@pytest.mark.parametrize("after", [True, False])
def test_a_call_decides_which_statistics_are_used(before, during, after):
    def loss(model, batch, keys):
        model.set_attributes(nnx.BatchNorm, use_running_average=before)
        y = model.w[...] * batch.features["x"][..., None]
        if during != "unused":
            y = model.norm(y, *([] if during in (None, "own") else [during]))
        model.set_attributes(nnx.BatchNorm, use_running_average=after)
        return jnp.sum(y[..., 0], where=batch.mask), batch.num_tokens

    model, mesh, tx = FlaxNormalized(), jb.data_mesh(jax.devices()[:4]), optax.sgd(0.1)
    if during == "own":
        model.norm = OwnStatistics(1, rngs=nnx.Rngs(0))
    step = jb.make_train_step(loss, tx, mesh, mode="shard_map")
    is_right = before if during is None else during
    with nullcontext() if is_right else pytest.raises(ValueError, match="statistics"):
        step(jb.create_state(model, tx, mesh), on_mesh(make_batch(), mesh))


def test_statistics_of_one_device_are_refused_in_evaluation_and_prediction():
    def outputs(params, batch):
        norm = linen.BatchNorm(use_running_average=False, use_bias=False)
        variables = {"params": {"scale": params["scale"]}}
        x = batch.features["x"][..., None]
        return norm.apply(variables, x, mutable=["batch_stats"])[0]

    def loss(params, batch, keys):
        y = outputs(params, batch)[..., 0]
        return jnp.sum(y, where=batch.mask), batch.num_tokens

    def predict_fn(params, batch):
        return {"y": outputs(params, batch)}

    mesh = jb.data_mesh(jax.devices()[:4])
    state = jb.create_state({"scale": jnp.ones(1)}, mesh=mesh)
    batch = on_mesh(make_batch(), mesh)
    jb.make_eval_step(loss, mesh)(state, batch)
    with pytest.raises(ValueError, match="`loss_fn` uses `linen.BatchNorm`"):
        jb.make_eval_step(loss, mesh, mode="shard_map")(state, batch)
    with pytest.raises(ValueError, match="`predict_fn` uses `linen.BatchNorm`"):
        jb.make_predict_step(predict_fn, mesh, mode="shard_map")(state, batch)


def linen_normalization(axis_name):
    class Module(linen.Module):
        @linen.compact
        def __call__(self, x):
            norm = linen.BatchNorm(axis_name=axis_name, use_running_average=False)
            return norm(x)

    def loss(variables, batch, keys):
        x = batch.features["x"][..., None]
        y, new = Module().apply(variables, x, mutable=["batch_stats"])
        total = jnp.sum(jnp.sin(y * x)[..., 0], where=batch.mask)
        return total, batch.num_tokens, {}, new

    return Module(), loss, {"sample": np.ones((1, 1, 1), np.float32)}


def nnx_normalization(axis_name):
    model, loss, options = flax_nnx(False)
    model.norm.axis_name = axis_name
    return model, loss, options


@pytest.mark.parametrize("make", [linen_normalization, nnx_normalization])
def test_batch_normalization_that_is_the_same_on_all_devices_is_accepted(make):
    mesh, tx = jb.data_mesh(jax.devices()[:4]), optax.sgd(0.1)
    batch, norms = on_mesh(make_batch(), mesh), []
    for mode, axis_name in (("jit", None), ("shard_map", "data")):
        module, loss, options = make(axis_name)
        state = jb.create_state(module, tx, mesh, **options)
        _, metrics = jb.make_train_step(loss, tx, mesh, mode=mode)(state, batch)
        norms.append(metrics["grad_norm"])
    np.testing.assert_allclose(*norms, rtol=1e-5)


@pytest.mark.parametrize("mode", QUICK_MODES)
@pytest.mark.parametrize("layer", ["flax", "ours", "none"])
def test_flax_is_unchanged(mode, layer):
    model = {"w": jnp.ones(())}
    if layer != "none":
        kind = nnx.BatchNorm if layer == "flax" else jb.layers.NnxBatchNorm
        model = kind(1, rngs=nnx.Rngs(0))
        model.eval()

    def loss(model, batch, keys):
        x = batch.features["x"][..., None]
        y = model["w"] * x if layer == "none" else model(x)
        return jnp.sum(y[..., 0], where=batch.mask), batch.num_tokens

    mesh, tx = jb.data_mesh(jax.devices()[:4]), optax.sgd(0.1)
    step = jb.make_train_step(loss, tx, mesh, mode=mode)
    step(jb.create_state(model, tx, mesh), on_mesh(make_batch(), mesh))
    for owner in (nnx, linen, *vars(nnx).values(), *vars(linen).values()):
        for function in getattr(owner, "__dict__", {}).values():
            code = getattr(function, "__code__", None)
            assert code is None or "jaxbucket" not in code.co_filename, function


def test_variables_as_third_value_are_refused():
    def loss(variables, batch, keys):
        total = variables["params"]["w"] * jnp.sum(batch.features["x"])
        return total, batch.num_tokens, {"level": variables["level"]}

    with pytest.raises(
        ValueError, match=r"\['level'\] as its third .*weight, {}, new`"
    ):
        step_once(loss, variables={"level": {"x": np.float32(1)}})
