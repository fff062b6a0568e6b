"""Steps are timed on a few shapes, with a copy of the state."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxbucket as jb
from jaxbucket.sharding.mesh import batch_sharding

EXAMPLE = {"tokens": np.array([3, 1, 4], np.int32), "label": np.float32(2)}
SHAPES = [jb.Bucket(16, 8), jb.Bucket(8, 16), jb.Bucket(8, 8)]
ONE, TWO = (jb.data_mesh(jax.devices()[:n]) for n in (1, 2))


def calibrate(step=lambda s, b: (s, b.num_tokens), shapes=SHAPES, mesh=TWO, **options):
    state = jb.sharding.replicate(jnp.zeros(()), mesh)
    options = {"example": EXAMPLE, **options}
    return jb.train.calibrate(step, state, shapes, mesh=mesh, **options)


def loss_fn(model, batch, keys):
    del keys
    logits = model(batch.features["tokens"])
    loss = optax.softmax_cross_entropy_with_integer_labels(
        logits, batch.features["tokens"]
    )
    return jnp.sum(jnp.where(batch.mask, loss, 0)), batch.num_tokens


def make_step(mesh, mode="jit"):
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Embed(8, 4, rngs=rngs), nnx.Linear(4, 8, rngs=rngs))
    tx = optax.sgd(1e-2, momentum=0.9)
    state = jb.create_state(model, tx, mesh)
    return jb.make_train_step(loss_fn, tx, mesh, mode=mode), state


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mode", "num_devices"), [("jit", 1), ("shard_map", 8), ("pmap", 8)]
)
def test_every_shape_is_compiled_once_and_the_state_is_not_donated(mode, num_devices):
    mesh = jb.data_mesh(jax.devices()[:num_devices])
    step_fn, state = make_step(mesh, mode)
    before = jax.tree.map(np.array, state)
    with jb.compile.count_compiles() as compiles:
        measured = jb.train.calibrate(step_fn, state, SHAPES, EXAMPLE, mesh, repeats=2)
    # jax names every pmapped function `_fun`.
    assert compiles["_fun" if mode == "pmap" else "train_step"] == len(SHAPES)
    assert list(measured.step_seconds) == SHAPES
    assert measured.compile_seconds.keys() == set(SHAPES)
    for seconds in (measured.step_seconds, measured.compile_seconds):
        assert all(value > 0 for value in seconds.values())
    after = jax.tree.map(np.array, state)
    jax.tree.map(np.testing.assert_array_equal, before, after)
    # The state is not donated, and can be used for training.
    specs = jb.sharding.batch_specs(jb.BucketPlan.from_shapes([(8, 8)]), EXAMPLE, mesh)
    jb.compile_steps(step_fn, state, specs)


class Recorded:
    """A step that records its batches, and is slow for one shape."""

    def __init__(self, seconds=0.0):
        self.batches = []
        self._seconds = seconds

    def step(self, state, batch):
        tokens = batch.features["tokens"]

        def record(*leaves):
            self.batches.append(jax.tree.unflatten(structure, leaves))
            if tokens.shape == (16, 8):
                time.sleep(self._seconds)
            return np.float32(1)

        leaves, structure = jax.tree.flatten(batch)
        shape = jax.ShapeDtypeStruct((), np.float32)
        done = jax.pure_callback(record, shape, *leaves)
        return state + done, {"done": done}


@pytest.mark.parametrize("donated", [(), (0,)])
def test_batches_repeat_the_example_and_shapes_take_turns(donated):
    recorded = Recorded()
    step_fn = jax.jit(recorded.step, donate_argnums=donated)
    state = jb.sharding.replicate(jnp.zeros(()), ONE)
    jb.train.calibrate(step_fn, state, SHAPES, EXAMPLE, ONE, repeats=3)
    # Three steps at a time.
    turns = [batch.bucket for batch in recorded.batches[::3]]
    assert turns == SHAPES * 4 and len(recorded.batches) == 3 * len(turns)
    for batch in recorded.batches:
        assert np.all(batch.mask)
        assert np.all(batch.features["label"] == 2)
        for row in batch.features["tokens"]:
            np.testing.assert_array_equal(row, np.resize([3, 1, 4], len(row)))
    assert float(state) == 0


def test_each_shape_has_its_own_step_time():
    seconds = calibrate(Recorded(0.15).step, mesh=ONE, repeats=3).step_seconds
    slow, *others = (seconds[shape] for shape in SHAPES)
    assert max(others) < 0.1 < slow


def test_only_named_sequences_are_stretched():
    shapes = []

    def step(state, batch):
        shapes.append({name: x.shape for name, x in batch.features.items()})
        return state, {"tokens": batch.num_tokens}

    example = {"tokens": np.arange(3), "pair": np.arange(2)}
    options = {"example": example, "sequences": ["tokens"], "repeats": 1}
    calibrate(step, [jb.Bucket(4, 8)], **options)
    assert shapes == [{"tokens": (4, 8), "pair": (4, 2)}]


def test_a_sharded_state_keeps_its_sharding():
    mesh = jb.data_mesh()
    sharding = batch_sharding(mesh)
    state = jax.device_put(jnp.arange(16.0), sharding)

    def step(state, batch):
        return state + 1, batch.num_tokens

    step_fn = jax.jit(step, donate_argnums=0, out_shardings=(sharding, None))
    jb.train.calibrate(step_fn, state, SHAPES, EXAMPLE, mesh, repeats=1)
    assert state.sharding == sharding
    np.testing.assert_array_equal(state, np.arange(16.0))


@pytest.mark.exhaustive
def test_the_measured_cost_can_be_planned_with():
    step_fn, state = make_step(ONE)
    lengths = np.random.default_rng(0).integers(1, 60, 300)
    limits = jb.Limits(max_tokens=256, seq_len_multiple=4)
    shapes = jb.train.calibration_shapes(limits, lengths)
    measured = jb.train.calibrate(step_fn, state, shapes, EXAMPLE, ONE, repeats=2)
    cost = measured.cost
    assert cost(16, 16) > 0
    limits = dataclasses.replace(limits, cost_fn=cost)
    curve = jb.plan.plan_curve(
        lengths, limits, compile_seconds=measured.seconds_per_compile
    )
    plan = curve.chosen.plan
    assert plan.cost_unit == "s"
    report = jb.report(plan, lengths)
    assert report.epoch_cost == pytest.approx(curve.chosen.epoch_seconds)
    numbers = measured.to_dict()
    assert numbers["cost"] == cost.to_dict()
    assert [shape["bucket"] for shape in numbers["shapes"]] == [
        [b.batch_size, b.seq_len] for b in shapes
    ]


def test_seconds_per_compile_is_the_median():
    bucket = SHAPES[0]
    compiled = dict(zip(SHAPES, (9.0, 2.0, 3.0), strict=True))
    measured = jb.train.Calibration({bucket: 0.1}, compiled)
    assert measured.seconds_per_compile == 3
    assert measured.cost(16, 8) == pytest.approx(0.1)


@pytest.mark.parametrize("seed", range(30))
def test_shapes_respect_the_limits_and_span_the_lengths(seed):
    rng = np.random.default_rng(seed)
    multiples = int(rng.choice([1, 4, 8])), int(rng.choice([1, 32, 100]))
    lengths = rng.lognormal(rng.uniform(1, 7), 1, 500).clip(1, 5000).astype(int)
    last = -(-int(lengths.max()) // multiples[1]) * multiples[1]
    limits = jb.Limits(
        max_tokens=int(last * multiples[0] * rng.integers(1, 9)),
        batch_size_multiple=multiples[0],
        seq_len_multiple=multiples[1],
    )
    shapes = jb.train.calibration_shapes(limits, lengths)
    assert 1 <= len(shapes) <= 7
    assert len(set(shapes)) == len(shapes)
    for shape in shapes:
        assert shape.num_tokens <= limits.max_tokens
        assert shape.batch_size % multiples[0] == shape.seq_len % multiples[1] == 0
    seq_lens = [shape.seq_len for shape in shapes]
    assert max(seq_lens) == last
    assert min(seq_lens) < np.percentile(lengths, 5) + multiples[1]
    largest = max(shape.batch_size for shape in shapes)
    if largest >= 4 * multiples[0]:
        # A small shape separates the constant time from the time per token.
        small = min(shape.num_tokens for shape in shapes)
        assert 3 * small < max(shape.num_tokens for shape in shapes)


def test_a_single_length_needs_at_most_two_shapes():
    limits = jb.Limits(max_tokens=64)
    assert jb.train.calibration_shapes(limits, [8, 8, 8]) == [
        jb.Bucket(8, 8),
        jb.Bucket(2, 8),
    ]
    limits = jb.Limits(max_tokens=8)
    assert jb.train.calibration_shapes(limits, [8]) == [jb.Bucket(1, 8)]


def test_overlong_examples_do_not_stretch_the_shapes():
    limits = jb.Limits(max_tokens=64, max_seq_len=16, overlong="truncate")
    shapes = jb.train.calibration_shapes(limits, [4, 9, 100])
    assert max(shape.seq_len for shape in shapes) == 16
    shapes = jb.train.calibration_shapes(limits, [100, 200])
    assert {shape.seq_len for shape in shapes} == {16}


def test_invalid_lengths_and_limits_are_refused():
    with pytest.raises(ValueError, match="`lengths`"):
        jb.train.calibration_shapes(jb.Limits(max_tokens=8), [])
    with pytest.raises(ValueError, match="`max_tokens=8`"):
        jb.train.calibration_shapes(jb.Limits(max_tokens=8), [9])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("shapes", {"shapes": []}),
        ("shapes", {"shapes": [jb.Bucket(8, {"a": 2, "b": 2})]}),
        ("repeats", {"repeats": 0}),
        ("batch_size", {"shapes": [jb.Bucket(3, 8)]}),
    ],
)
def test_invalid_arguments_are_refused(name, options):
    with pytest.raises(ValueError, match=f"`{name}="):
        calibrate(**options)
