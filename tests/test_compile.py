"""One executable per bucket: counted by XLA's events and by Python's own traces."""

import collections
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxbucket as jb


class Examples:
    """Examples of given lengths, made from their index when they are read."""

    def __init__(self, lengths: np.ndarray):
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        values = (index + np.arange(self.lengths[index])) % 7 - 3
        return {"x": values.astype(np.float32)}


class TracedLoss:
    """Squared error of `w * x` against 1; counts how often Python runs it."""

    def __init__(self):
        self.traces = collections.Counter()

    def __call__(self, params, batch, keys):
        self.traces[batch.bucket] += 1
        error = jnp.square(params["w"] * batch.features["x"] - 1)
        return jnp.where(batch.mask, error, 0).sum(), batch.num_tokens


TX = optax.sgd(1e-3, momentum=0.9)


def new_state(mesh):
    return jb.replicate(jb.create_state({"w": np.float32(0.5)}, TX), mesh)


def small_setup(num_buckets=3, num_devices=2):
    lengths = np.random.default_rng(0).integers(1, 41, 150)
    plan = jb.plan_buckets(
        lengths, max_tokens=320, num_buckets=num_buckets, batch_size_multiple=8
    )
    return Examples(lengths), plan, jb.data_mesh(jax.devices()[:num_devices])


def first_batches(source, plan, mesh):
    """The first global batch of every bucket."""
    schedule = jb.BatchSchedule(plan, source.lengths)
    found = {}
    for batch in jb.prefetch_to_mesh(jb.batch_dataset(source, schedule), mesh):
        found.setdefault(batch.bucket, batch)
    assert found.keys() == set(plan.buckets)
    return found


def some_steps_of_every_bucket(schedule, count=2):
    """Steps of epochs 0 and 1, at most `count` of a bucket from each, in order."""
    steps = []
    for epoch in range(2):
        left = dict.fromkeys(schedule.plan.buckets, count)
        for step in range(epoch * len(schedule), (epoch + 1) * len(schedule)):
            bucket = schedule[step].bucket
            if left.get(bucket):
                left[bucket] -= 1
                steps.append(step)
            if not any(left.values()):
                break
    return steps


@pytest.fixture(scope="module")
def compiled():
    """(steps, plan, mesh, first batches) of a step that gives the loss."""
    source, plan, mesh = small_setup()

    def loss_step(state, batch):
        return (state * batch.features["x"]).sum()

    specs = jb.batch_specs(plan, source[0], mesh)
    state = jb.replicate(np.float32(2), mesh)
    steps = jb.compile_steps(loss_step, state, specs, progress=False)
    return steps, plan, mesh, first_batches(source, plan, mesh)


# Once per bucket (invariant 1)


@pytest.mark.parametrize("mode", ["jit", "shard_map"])
@pytest.mark.parametrize("ahead", [True, False])
def test_a_train_step_is_compiled_once_per_bucket_over_two_epochs(ahead, mode):
    source, plan, mesh = small_setup()
    schedule = jb.BatchSchedule(plan, source.lengths)
    loss = TracedLoss()
    with jb.count_compiles() as compiles:
        step = jb.data_parallel(loss, TX, mesh, mode=mode)
        state = new_state(mesh)
        if ahead:
            specs = jb.batch_specs(plan, source[0], mesh)
            step = jb.compile_steps(step, state, specs, progress=False)
        dataset = jb.batch_dataset(source, schedule, num_steps=2 * len(schedule))
        for batch in jb.prefetch_to_mesh(dataset, mesh):
            state, _ = step(state, batch)
    assert state.step == 2 * len(schedule) > 2 * len(plan)
    assert compiles["train_step"] == len(plan)
    assert len(loss.traces) == len(plan)
    assert set(loss.traces.values()) == {1}


@pytest.mark.parametrize("mode", ["jit", "shard_map"])
@pytest.mark.parametrize("ahead", [True, False])
def test_an_evaluation_step_is_compiled_once_per_bucket(ahead, mode):
    source, plan, mesh = small_setup()
    schedule = jb.BatchSchedule(plan, source.lengths, order="source")
    loss = TracedLoss()
    with jb.count_compiles() as compiles:
        step = jb.data_parallel_eval(loss, mesh, mode=mode)
        state = new_state(mesh)
        if ahead:
            specs = jb.batch_specs(plan, source[0], mesh)
            step = jb.compile_steps(step, state, specs, progress=False)
        for _ in range(2):
            dataset = jb.batch_dataset(source, schedule)
            for batch in jb.prefetch_to_mesh(dataset, mesh):
                step(state, batch)
    assert compiles["eval_step"] == len(plan)
    assert len(loss.traces) == len(plan)
    assert set(loss.traces.values()) == {1}


@pytest.mark.parametrize("seed", range(4))
def test_random_plans_compile_once_per_bucket(seed):
    rng = np.random.default_rng(seed)
    lengths = 1 + rng.geometric(0.02, 300).clip(max=200)
    plan = jb.plan_buckets(
        lengths,
        max_tokens=int(rng.integers(8 * 201, 5000)),
        num_buckets=int(rng.integers(1, 5)),
        batch_size_multiple=int(rng.choice([2, 4, 8])),
        boundaries=str(rng.choice(["optimal", "quantile", "geometric"])),
    )
    check_counts(lengths, plan, seed=seed)


def test_real_lengths_compile_once_per_bucket(real_lengths):
    plan = jb.plan_buckets(
        real_lengths,
        max_tokens=8 * int(real_lengths.max()),
        num_buckets=3,
        batch_size_multiple=2,
    )
    check_counts(real_lengths, plan, seed=0)


def check_counts(lengths, plan, seed):
    """Trains and evaluates some steps of every bucket, in two epochs."""
    source, mesh = Examples(lengths), jb.data_mesh(jax.devices()[:2])
    schedule = jb.BatchSchedule(plan, lengths, seed=seed)
    train_loss, eval_loss = TracedLoss(), TracedLoss()
    with jb.count_compiles() as compiles:
        state = new_state(mesh)
        specs = jb.batch_specs(plan, source[0], mesh)
        train = jb.data_parallel(train_loss, TX, mesh)
        train = jb.compile_steps(train, state, specs, progress=False)
        evaluate = jb.data_parallel_eval(eval_loss, mesh)
        evaluate = jb.compile_steps(evaluate, state, specs, progress=False)
        dataset = jb.batch_dataset(source, schedule, num_steps=2 * len(schedule))
        order = some_steps_of_every_bucket(schedule)
        batches = (dataset[step] for step in order)
        ran = set()
        for batch in jb.prefetch_to_mesh(batches, mesh):
            ran.add(batch.bucket)
            evaluate(state, batch)
            state, _ = train(state, batch)
    assert len(order) > len(ran) > 0
    # A bucket all of whose examples went up into a longer one has no batch.
    counts = zip(plan.buckets, schedule.flow.batches, strict=True)
    assert ran == {bucket for bucket, batches in counts if batches}
    for loss in (train_loss, eval_loss):
        assert loss.traces == dict.fromkeys(plan.buckets, 1)
    assert compiles["train_step"] == compiles["eval_step"] == len(plan)


def test_nothing_is_compiled_after_the_first_step_of_each_bucket():
    source, plan, mesh = small_setup(num_devices=8)
    schedule = jb.BatchSchedule(plan, source.lengths)
    state = new_state(mesh)
    specs = jb.batch_specs(plan, source[0], mesh)
    steps = jb.data_parallel(TracedLoss(), TX, mesh)
    steps = jb.compile_steps(steps, state, specs, progress=False)
    evaluate = jb.data_parallel_eval(TracedLoss(), mesh)
    evaluate = jb.compile_steps(evaluate, state, specs, progress=False)

    def run(first, last):
        nonlocal state
        dataset = jb.batch_dataset(source, schedule, start_step=first, num_steps=last)
        for batch in jb.prefetch_to_mesh(dataset, mesh):
            loss = evaluate(state, batch)["loss"]
            state, metrics = steps(state, batch)
            assert np.isfinite([float(loss), float(metrics["loss"])]).all()

    with jb.count_compiles() as first_epoch:
        run(0, len(schedule))
    with jb.count_compiles() as second_epoch:
        run(len(schedule), 2 * len(schedule))
    assert not {"train_step", "eval_step"} & first_epoch.keys()
    assert not second_epoch


def test_parameters_given_as_python_numbers_do_not_compile_twice():
    source, plan, mesh = small_setup(num_buckets=1)
    (batch,) = first_batches(source, plan, mesh).values()
    state = jb.replicate(jb.create_state({"w": 0.5}, TX), mesh)
    with jb.count_compiles() as compiles:
        step = jb.data_parallel(TracedLoss(), TX, mesh)
        for _ in range(3):
            state, _ = step(state, batch)
    assert compiles["train_step"] == 1


def test_the_state_may_be_shapes_alone():
    source, plan, mesh = small_setup(num_buckets=1)
    state = new_state(mesh)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    specs = jb.batch_specs(plan, source[0], mesh)
    step = jb.data_parallel(TracedLoss(), TX, mesh)
    steps = jb.compile_steps(step, shapes, specs, progress=False)
    (batch,) = first_batches(source, plan, mesh).values()
    expected, _ = step(new_state(mesh), batch)
    got, _ = steps(state, batch)
    assert got.params["w"] == expected.params["w"] != 0.5


# Any step function


@pytest.mark.parametrize("jitted", [False, True])
def test_it_compiles_a_step_of_your_own(jitted):
    source, plan, mesh = small_setup()
    traces = collections.Counter()

    def my_step(state, batch):
        traces[batch.bucket] += 1
        return state + batch.num_tokens, {"rows": batch.num_examples}

    step = jax.jit(my_step, donate_argnums=0) if jitted else my_step
    state = first_state = jb.replicate(np.int32(0), mesh)
    with jb.count_compiles() as compiles:
        specs = jb.batch_specs(plan, source[0], mesh)
        steps = jb.compile_steps(step, state, specs, progress=False)
        schedule = jb.BatchSchedule(plan, source.lengths)
        rows = 0
        for batch in jb.prefetch_to_mesh(jb.batch_dataset(source, schedule), mesh):
            state, metrics = steps(state, batch)
            rows += int(metrics["rows"])
    assert (state, rows) == (source.lengths.sum(), len(source))
    assert traces == dict.fromkeys(plan.buckets, 1)
    assert compiles["my_step"] == len(plan)
    # What is donated is the step's own choice.
    assert first_state.is_deleted() == jitted


def test_a_step_without_a_name_is_welcome(compiled):
    _, plan, mesh, batches = compiled
    source, _, _ = small_setup()
    step = functools.partial(lambda scale, state, batch: scale * state, 3)
    specs = jb.batch_specs(plan, source[0], mesh)
    steps = jb.compile_steps(step, jb.replicate(np.int32(2), mesh), specs)
    for batch in batches.values():
        assert steps(jb.replicate(np.int32(2), mesh), batch) == 6


def test_buckets_run_their_own_executable(compiled):
    steps, _, mesh, batches = compiled
    state = jb.replicate(np.float32(2), mesh)
    for bucket, batch in batches.items():
        want = 2 * np.asarray(batch.features["x"]).sum()
        assert steps(state, batch) == want
        assert steps[bucket](state, batch) == want


def test_steps_keep_a_sharding_over_other_axes():
    source, plan, _ = small_setup(num_buckets=2)
    mesh = jax.make_mesh(
        (2, 2),
        ("data", "model"),
        axis_types=(jax.sharding.AxisType.Auto,) * 2,
        devices=jax.devices()[:4],
    )
    sharding = NamedSharding(mesh, PartitionSpec("model"))
    state = jax.device_put(np.arange(4, dtype=np.float32), sharding)

    @functools.partial(jax.jit, out_shardings=sharding)
    def step(state, batch):
        return state + 1

    steps = jb.compile_steps(
        step, state, jb.batch_specs(plan, source[0], mesh), progress=False
    )
    for batch in first_batches(source, plan, mesh).values():
        state = steps(state, batch)
    assert state.sharding == sharding
    np.testing.assert_array_equal(state, np.arange(4) + len(plan))


# A mapping


def test_steps_are_a_mapping_from_bucket_to_executable(compiled):
    steps, plan, _, _ = compiled
    assert isinstance(steps, Mapping)
    assert list(steps) == list(plan.buckets)
    assert len(steps) == len(plan) == 3
    for bucket in plan.buckets:
        assert bucket in steps
        assert isinstance(steps[bucket], jax.stages.Compiled)
        assert steps[bucket].memory_analysis().argument_size_in_bytes > 0
    assert len({id(executable) for executable in steps.values()}) == 3


def test_a_bucket_outside_the_plan_is_no_key(compiled):
    steps, _, _, _ = compiled
    other = jb.Bucket(1, 1)
    assert other not in steps
    assert steps.get(other) is None
    with pytest.raises(KeyError):
        steps[other]


def test_seconds_are_known_for_every_bucket(compiled):
    steps, plan, _, _ = compiled
    assert steps.seconds.keys() == set(plan.buckets)
    assert all(seconds > 0 for seconds in steps.seconds.values())


# What is refused


def test_what_is_no_batch_is_refused(compiled):
    with pytest.raises(ValueError, match="`batch` is a dict, not a `jaxbucket.Batch`"):
        compiled[0](None, {"tokens": 1})


def test_a_loop_that_looks_at_nothing_runs_a_few_steps_ahead():
    lengths = [8] * 16
    plan = jb.plan_buckets(lengths, max_tokens=64, num_buckets=1)
    mesh, source = jb.data_mesh(jax.devices()[:1]), Examples(np.array(lengths))

    def slow(state, batch):
        del batch
        state = jax.lax.fori_loop(0, 20, lambda _, x: jnp.tanh(x @ x), state)
        return state, {"sum": state.sum()}

    step_fn = jax.jit(slow, donate_argnums=0)
    state = jb.replicate(jnp.eye(300), mesh)
    specs = jb.batch_specs(plan, source[0], mesh)
    steps = jb.compile_steps(step_fn, state, specs)
    (batch,) = first_batches(source, plan, mesh).values()
    sums, ahead = [], []
    for _ in range(30):
        state, metrics = steps(state, batch)
        sums.append(metrics["sum"])
        ahead.append(sum(not x.is_ready() for x in sums))
    assert max(ahead) <= 8
    # It does run ahead: else nothing is shown here.
    assert max(ahead) > 2


def test_a_shape_outside_the_plan_is_refused(compiled):
    steps, plan, mesh, _ = compiled
    batch = jb.collate_rows([{"x": np.ones(3, np.float32)}], jb.Bucket(16, 5))
    (batch,) = jb.prefetch_to_mesh([batch], mesh)
    with pytest.raises(ValueError) as refusal:
        steps(jb.replicate(np.float32(2), mesh), batch)
    message = str(refusal.value)
    assert "shape [16, 5] is outside the plan" in message
    assert all(str(bucket) in message for bucket in plan.buckets)
    assert "compile for another" in message


CHANGES = {
    "dtype": (
        lambda batch: {"x": batch.features["x"].astype(jnp.float16)},
        r"batch.features\['x'\]` is float16\[{b}, {t}\], but .* for float32\[{b}, {t}",
    ),
    "shape": (
        lambda batch: {"x": batch.features["x"][:, :, None]},
        r"\['x'\]` is float32\[{b}, {t}, 1\], but .* compiled for float32\[{b}, {t}\]",
    ),
    "missing": (
        lambda batch: {},
        r"\['x'\]` is missing, but \[{b}, {t}\] was compiled for float32\[{b}, {t}\]",
    ),
    "another": (
        lambda batch: {**batch.features, "y": batch.features["x"]},
        r"batch.features\['y'\]` was not there when \[{b}, {t}\] was compiled",
    ),
    "renamed": (
        lambda batch: {"inputs": batch.features["x"]},
        r"\['inputs'\]` was not there when \[{b}, {t}\] was compiled",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_features_other_than_the_planned_are_refused(compiled, change):
    steps, plan, mesh, batches = compiled
    to_features, message = CHANGES[change]
    for bucket, batch in batches.items():
        wrong = batch._replace(features=to_features(batch))
        pattern = message.replace("{b}", str(bucket.batch_size))
        pattern = pattern.replace("{t}", str(bucket.seq_len))
        pattern += ".*Convert the batch, or make `batch_specs` from an example like it"
        with pytest.raises(ValueError, match=pattern):
            steps(jb.replicate(np.float32(2), mesh), wrong)


def test_other_positions_than_the_planned_are_refused(compiled):
    steps, plan, mesh, batches = compiled
    batch = batches[plan.buckets[0]]
    wrong = batch._replace(
        positions={"x": batch.positions["x"].astype(jnp.float32)},
    )
    with pytest.raises(
        ValueError, match=r"batch.positions\['x'\]` is float32.*for int32"
    ):
        steps(jb.replicate(np.float32(2), mesh), wrong)


# count_compiles


def test_count_compiles_counts_by_name_and_only_inside():
    def triple(x):
        return 3 * x

    with jb.count_compiles() as compiles:
        for size in (2, 3, 2):
            jax.jit(triple)(np.zeros(size, np.float32))
    jax.jit(triple)(np.zeros(4, np.float32))
    assert compiles["triple"] == 2


def test_count_compiles_may_be_nested():
    def fourfold(x):
        return 4 * x

    with jb.count_compiles() as outer:
        jax.jit(fourfold)(np.zeros(2, np.float32))
        with jb.count_compiles() as inner:
            jax.jit(fourfold)(np.zeros(3, np.float32))
        jax.jit(fourfold)(np.zeros(4, np.float32))
    assert (outer["fourfold"], inner["fourfold"]) == (3, 1)


def test_count_compiles_stops_when_the_block_fails():
    def fivefold(x):
        return 5 * x

    with pytest.raises(KeyError), jb.count_compiles() as compiles:
        raise KeyError
    jax.jit(fivefold)(np.zeros(2, np.float32))
    assert not compiles
