"""Training over schedules with several plans: one program per shape, exact resume."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxbucket as jb


class Model(nnx.Module):
    """A mean of embeddings of bytes, or of projected frames."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(9, 4, rngs=rngs)
        self.project = nnx.Linear(3, 4, rngs=rngs)
        self.out = nnx.Linear(4, 1, rngs=rngs)


def loss_fn(model, batch, keys):
    """The loss knows a component by its features."""
    if "frames" in batch.features:
        (name, x) = "frames", model.project(batch.features["frames"])
    else:
        name = "tokens" if "tokens" in batch.features else "target"
        x = model.embed(batch.features[name])
    is_real = batch.segment_ids[name] > 0
    losses = (model.out(x)[..., 0] - 1) ** 2
    return jnp.where(is_real, losses, 0).sum(), is_real.sum()


def tokens_of(lengths):
    return [{"tokens": np.arange(n, dtype=np.int32) * n % 9} for n in lengths]


def compile_all(loader, tx, **options):
    state = jb.create_state(Model(nnx.Rngs(0)), tx, loader.mesh)
    step = jb.make_train_step(loss_fn, tx, loader.mesh, **options)
    return state, jb.compile_steps(step, state, loader.specs, progress=False)


@pytest.fixture
def mesh() -> jax.sharding.Mesh:
    return jb.data_mesh(jax.devices()[:2])


def mixture_of_three(seed: int = 0):
    """Returns a mixture of text, audio and pairs, and a source for each."""
    rng = np.random.default_rng(seed)
    text, audio = rng.integers(1, 17, 80), rng.integers(5, 25, 50)
    pairs = {"source": rng.integers(1, 9, 40), "target": rng.integers(1, 13, 40)}
    options = {"batch_size_multiple": 2, "num_buckets": 2}
    packing = jb.packing.pack(text, 32)
    plans = [
        jb.plan_buckets([32], max_tokens=128, batch_size_multiple=2),
        jb.plan_buckets(audio, max_tokens=150, **options),
        jb.plan_buckets(pairs, max_tokens=128, **options),
    ]
    mixture = jb.Mixture(
        {
            "text": jb.BatchSchedule(plans[0], text, packing=packing),
            "audio": jb.BatchSchedule(plans[1], audio, seed=1),
            "pairs": jb.BatchSchedule(plans[2], pairs, seed=2),
        },
        {"text": 0.5, "audio": 0.3, "pairs": 0.2},
    )
    frames = [rng.normal(size=(n, 3)).astype(np.float32) for n in audio]
    both = zip(*pairs.values(), strict=True)
    sources = {
        "text": tokens_of(text),
        "audio": [{"frames": x, "speaker": np.int32(1)} for x in frames],
        "pairs": [{"source": np.ones(a), "target": np.ones(b, int)} for a, b in both],
    }
    return mixture, sources


def test_three_components_share_one_compiled_step(mesh):
    num_steps = 20
    mixture, sources = mixture_of_three()
    loader = jb.MeshLoader(sources, mixture, mesh, num_steps=num_steps)
    tx = optax.sgd(0.05)
    with jb.compile.count_compiles() as compiles:
        state, steps = compile_all(loader, tx)
        stop, counts = num_steps // 3, dict.fromkeys(mixture.names, 0)
        for number, batch in enumerate(loader):
            if number == stop:
                # As in a checkpoint, because steps donate their state.
                saved = jax.device_get(jax.tree.leaves(state))
                position = loader.position(number)
            state, metrics = steps(state, batch)
            counts[mixture.name_at(number)] += 1
            for name, weight in zip(mixture.names, mixture.weights[0], strict=True):
                assert abs(counts[name] - weight * (number + 1)) < 2
    assert compiles["train_step"] == len(mixture.buckets) == len(steps)
    assert [x.steps for x in mixture.report(num_steps).components] == [*counts.values()]
    # A new run, with loaders and schedules of its own.
    mixture, sources = mixture_of_three()
    again = jb.MeshLoader(sources, mixture, mesh, num_steps=num_steps).resume(position)
    fresh = jb.create_state(Model(nnx.Rngs(1)), tx, mesh)
    places = [x.sharding for x in jax.tree.leaves(fresh)]
    leaves = jax.device_put(saved, places)
    resumed = jax.tree.unflatten(jax.tree.structure(fresh), leaves)
    for batch in again:
        resumed, last = steps(resumed, batch)
    assert last["loss"] == metrics["loss"]
    for a, b in zip(*map(jax.tree.leaves, (state, resumed)), strict=True):
        np.testing.assert_array_equal(a, b)


def mixture_of_one_shape(mesh, lengths=(3, 8), accumulate=1, **options):
    """Returns the loader of three components with one bucket, two of them alike."""
    plan = jb.BucketPlan.from_shapes([(2, 8)])
    names = ("text", "audio", "code")
    schedules = {name: jb.BatchSchedule(plan, lengths) for name in names}
    mixture = jb.Mixture(schedules, dict.fromkeys(schedules, 1), accumulate=accumulate)
    audio = [{"frames": np.full((n, 3), n, np.float32)} for n in lengths]
    sources = {"text": tokens_of(lengths), "audio": audio, "code": tokens_of(lengths)}
    return jb.MeshLoader(sources, mixture, mesh, **options)


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_shape_with_different_features_has_a_program_for_each(mesh, accumulate):
    loader = mixture_of_one_shape(mesh, num_steps=6)
    first, second = loader.specs
    assert list(map(str, loader.specs)) == ["[2, 8]", "[2, 8] of 'audio'"]
    with jb.compile.count_compiles() as compiles:
        state, steps = compile_all(loader, optax.sgd(0.1), accumulate=accumulate)
        for number, batch in enumerate(loader):
            is_audio = loader.schedule.name_at(number) == "audio"
            assert ("frames" in batch.features) == is_audio
            # The loss without jit, before the state is donated.
            total, count = loss_fn(state.model, batch, None)
            state, metrics = steps(state, (batch,) if accumulate else batch)
            assert metrics["loss"] == pytest.approx(float(total) / int(count), rel=1e-5)
    name = "add_micro_batch" if accumulate else "train_step"
    assert compiles[name] == 2 and set(steps) == {first, second}
    assert {x.label for x in steps.report.programs} >= {str(first), str(second)}


@pytest.mark.parametrize(
    ("accumulate", "mode", "compiled"),
    [
        (2, "jit", True),
        (3, "shard_map", False),
        pytest.param(4, "pmap", True, marks=pytest.mark.exhaustive),
    ],
)
def test_an_update_may_have_components_with_different_features(
    mesh, accumulate, mode, compiled
):
    loader = mixture_of_one_shape(mesh, accumulate=accumulate, num_steps=3)
    tx = optax.sgd(0.1)
    state = jb.create_state(Model(nnx.Rngs(0)), tx, mesh)
    steps = jb.make_train_step(loss_fn, tx, mesh, accumulate=True, mode=mode)
    if compiled:
        steps = jb.compile_steps(steps, state, loader.specs, progress=False)

    def mean_loss(params, batches):
        model = nnx.merge(nnx.graphdef(state.model), params)
        sums, counts = zip(*(loss_fn(model, x, None) for x in batches), strict=True)
        return sum(sums) / sum(counts).astype(np.float32)

    kinds = [{*x.features, *y.features} for x, y, *_ in loader]
    assert kinds.count({"tokens", "frames"}) >= 2
    for batches in loader:
        params = nnx.state(state.model, nnx.Param)
        loss, grads = jax.jit(jax.value_and_grad(mean_loss))(params, batches)
        expected = jax.tree.map(lambda x, g: x - 0.1 * g, params, grads)
        state, metrics = steps(state, batches)
        assert metrics["loss"] == pytest.approx(float(loss), rel=1e-5)
        updated = nnx.state(state.model, nnx.Param)
        for a, b in zip(*map(jax.tree.leaves, (expected, updated)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_components_of_an_update_need_the_same_sums(mesh):
    def loss_with_sums(model, batch, keys):
        total, count = loss_fn(model, batch, keys)
        return total, count, {next(iter(batch.features)): count}

    loader = mixture_of_one_shape(mesh, accumulate=2, num_steps=2)
    state = jb.create_state(Model(nnx.Rngs(0)), optax.sgd(0.1), mesh)
    step = jb.make_train_step(loss_with_sums, optax.sgd(0.1), mesh, accumulate=True)
    for train in (
        lambda: jb.compile_steps(step, state, loader.specs, progress=False),
        lambda: step(state, next(iter(loader))),
    ):
        with pytest.raises(ValueError, match="return the same sums for all micro"):
            train()


@pytest.mark.parametrize("kind", ["joined", "mixture"])
def test_predictions_need_a_single_plan(mesh, kind):
    lengths = [3, 8, 5, 4]
    plans = [jb.BucketPlan.from_shapes([(2 * n, 8)]) for n in (1, 2)]
    schedules = [jb.BatchSchedule(plan, lengths) for plan in plans]
    if kind == "joined":
        schedule, source = jb.JoinedSchedule({0: schedules[0], 4: schedules[1]}), None
    else:
        schedule = jb.Mixture(schedules, [1, 1])
        source = tokens_of([*lengths, *lengths])
    loader = jb.MeshLoader(source or tokens_of(lengths), schedule, mesh)
    state = jb.create_state(Model(nnx.Rngs(0)), optax.sgd(0.1), mesh)
    step = jb.make_predict_step(lambda model, batch: batch.features["tokens"], mesh)
    with pytest.raises(ValueError, match="2 plans"):
        jb.predict(step, state, loader, sequences=[], progress=False)
