"""Tests of `compile_steps`, which count XLA's compilations and Python's traces."""

import collections
import functools
import io
import json
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console

import jaxbucket as jb
from jaxbucket.compile.report import count_flops

exhaustive = pytest.mark.exhaustive


class Examples:
    """Examples of given lengths, computed from their index."""

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
    return jb.create_state({"w": np.float32(0.5)}, TX, mesh)


def small_setup(num_buckets=3, num_devices=2):
    lengths = np.random.default_rng(0).integers(1, 41, 150)
    plan = jb.plan_buckets(
        lengths, max_tokens=320, num_buckets=num_buckets, batch_size_multiple=8
    )
    return Examples(lengths), plan, jb.data_mesh(jax.devices()[:num_devices])


def first_batches(source, plan, mesh):
    """Returns the first global batch of every bucket."""
    schedule = jb.BatchSchedule(plan, source.lengths)
    batches = {}
    for batch in jb.sharding.prefetch_to_mesh(jb.batch_dataset(source, schedule), mesh):
        batches.setdefault(batch.bucket, batch)
    assert batches.keys() == set(plan.buckets)
    return batches


@pytest.fixture(scope="module")
def compiled():
    """(steps, plan, mesh, first batches) of a step that returns a loss."""
    source, plan, mesh = small_setup()

    def loss_step(state, batch):
        return (state * batch.features["x"]).sum()

    specs = jb.sharding.batch_specs(plan, source[0], mesh)
    state = jb.sharding.replicate(np.float32(2), mesh)
    steps = jb.compile_steps(loss_step, state, specs, progress=False)
    return steps, plan, mesh, first_batches(source, plan, mesh)


# One compilation per bucket (invariant 1)


@pytest.mark.parametrize(
    ("ahead", "mode"),
    [
        *((True, "shard_map"), (False, "jit")),
        pytest.param(True, "jit", marks=exhaustive),
        pytest.param(False, "shard_map", marks=exhaustive),
    ],
)
def test_steps_are_compiled_once_per_bucket_over_two_epochs(ahead, mode):
    source, plan, mesh = small_setup()
    schedule = jb.BatchSchedule(plan, source.lengths)
    losses = TracedLoss(), TracedLoss()
    with jb.compile.count_compiles() as compiles:
        train = jb.make_train_step(losses[0], TX, mesh, mode=mode)
        evaluate = jb.make_eval_step(losses[1], mesh, mode=mode)
        state = new_state(mesh)
        if ahead:
            specs = jb.sharding.batch_specs(plan, source[0], mesh)
            train, evaluate = (
                jb.compile_steps(step, state, specs, progress=False)
                for step in (train, evaluate)
            )
        for epoch in range(2):
            start, stop = (x * len(schedule) for x in (epoch, epoch + 1))
            dataset = jb.batch_dataset(
                source, schedule, start_step=start, num_steps=stop
            )
            with jb.compile.count_compiles() as later:
                for batch in jb.sharding.prefetch_to_mesh(dataset, mesh):
                    evaluate(state, batch)
                    state, _ = train(state, batch)
        assert not later
    assert state.step == 2 * len(schedule) > 2 * len(plan)
    assert compiles["train_step"] == compiles["eval_step"] == len(plan)
    for loss in losses:
        assert len(loss.traces) == len(plan) and set(loss.traces.values()) == {1}


def test_parameters_given_as_python_numbers_do_not_compile_twice():
    source, plan, mesh = small_setup(num_buckets=1)
    (batch,) = first_batches(source, plan, mesh).values()
    state = jb.create_state({"w": 0.5}, TX, mesh)
    with jb.compile.count_compiles() as compiles:
        step = jb.make_train_step(TracedLoss(), TX, mesh)
        for _ in range(3):
            state, _ = step(state, batch)
    assert compiles["train_step"] == 1


def test_the_state_may_consist_of_shapes():
    source, plan, mesh = small_setup(num_buckets=1)
    state = new_state(mesh)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    specs = jb.sharding.batch_specs(plan, source[0], mesh)
    step = jb.make_train_step(TracedLoss(), TX, mesh)
    steps = jb.compile_steps(step, shapes, specs, progress=False)
    (batch,) = first_batches(source, plan, mesh).values()
    expected, _ = step(new_state(mesh), batch)
    result, _ = steps(state, batch)
    assert result.params["w"] == expected.params["w"] != 0.5


# Any step function


@pytest.mark.parametrize("jitted", [False, True])
def test_custom_steps_are_compiled(jitted):
    source, plan, mesh = small_setup()
    traces = collections.Counter()

    def my_step(state, batch):
        traces[batch.bucket] += 1
        return state + batch.num_tokens, {"rows": batch.num_examples}

    step = jax.jit(my_step, donate_argnums=0) if jitted else my_step
    state = first_state = jb.sharding.replicate(np.int32(0), mesh)
    with jb.compile.count_compiles() as compiles:
        specs = jb.sharding.batch_specs(plan, source[0], mesh)
        steps = jb.compile_steps(step, state, specs, progress=False)
        schedule = jb.BatchSchedule(plan, source.lengths)
        rows = 0
        for batch in jb.sharding.prefetch_to_mesh(
            jb.batch_dataset(source, schedule), mesh
        ):
            state, metrics = steps(state, batch)
            rows += int(metrics["rows"])
    assert (state, rows) == (source.lengths.sum(), len(source))
    assert traces == dict.fromkeys(plan.buckets, 1)
    assert compiles["my_step"] == len(plan)
    # Only the step decides what is donated.
    assert first_state.is_deleted() == jitted


@pytest.mark.parametrize("decorate", [lambda x: x, nnx.jit])
def test_a_step_that_changes_modules_in_place_has_to_return_them(decorate):
    source, plan, mesh = small_setup()

    @nnx.jit
    def update(model, optimizer, batch):
        def loss_fn(model):
            return model(batch.mask.astype(jnp.float32)[..., None]).sum()

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    state = model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    state = jb.sharding.replicate(state, mesh)
    specs = jb.sharding.batch_specs(plan, source[0], mesh)
    lost = decorate(lambda state, batch: update(*state, batch))
    with pytest.raises(ValueError, match="`step_fn` changes its state in place"):
        jb.compile_steps(lost, state, specs, progress=False)
    kept = decorate(lambda state, batch: (state, update(*state, batch)))
    steps = jb.compile_steps(kept, state, specs, progress=False)
    schedule = jb.BatchSchedule(plan, source.lengths)
    batches = jb.batch_dataset(source, schedule)
    for batch in jb.sharding.prefetch_to_mesh(batches, mesh):
        state, _ = steps(state, batch)
    assert int(state[1].step[...]) == len(batches)


def test_the_state_may_be_sharded_over_other_axes():
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
        step, state, jb.sharding.batch_specs(plan, source[0], mesh), progress=False
    )
    for batch in first_batches(source, plan, mesh).values():
        state = steps(state, batch)
    assert state.sharding == sharding
    np.testing.assert_array_equal(state, np.arange(4) + len(plan))


def test_steps_are_a_mapping_from_bucket_to_executable(compiled):
    steps, plan, mesh, batches = compiled
    assert isinstance(steps, Mapping)
    assert list(steps) == list(plan.buckets)
    assert len(steps) == len(plan) == 3
    state = jb.sharding.replicate(np.float32(2), mesh)
    for bucket, batch in batches.items():
        assert bucket in steps and isinstance(steps[bucket], jax.stages.Compiled)
        want = 2 * np.asarray(batch.features["x"]).sum()
        assert steps(state, batch) == steps[bucket](state, batch) == want
    assert steps.get(jb.Bucket(1, 1)) is None


# Refused batches


def test_a_loop_that_reads_no_metrics_runs_a_few_steps_ahead():
    lengths = [8] * 16
    plan = jb.plan_buckets(lengths, max_tokens=64, num_buckets=1)
    mesh, source = jb.data_mesh(jax.devices()[:1]), Examples(np.array(lengths))

    def slow(state, batch):
        del batch
        state = jax.lax.fori_loop(0, 20, lambda _, x: jnp.tanh(x @ x), state)
        return state, {"sum": state.sum()}

    step_fn = jax.jit(slow, donate_argnums=0)
    state = jb.sharding.replicate(jnp.eye(300), mesh)
    specs = jb.sharding.batch_specs(plan, source[0], mesh)
    steps = jb.compile_steps(step_fn, state, specs)
    (batch,) = first_batches(source, plan, mesh).values()
    sums, ahead = [], []
    for _ in range(30):
        state, metrics = steps(state, batch)
        sums.append(metrics["sum"])
        ahead.append(sum(not x.is_ready() for x in sums))
    assert max(ahead) <= 8
    # The loop does run ahead. Otherwise this would test nothing.
    assert max(ahead) > 2


def test_a_shape_outside_the_plan_is_refused(compiled):
    steps, plan, mesh, _ = compiled
    batch = jb.data.collate_rows([{"x": np.ones(3, np.float32)}], jb.Bucket(16, 5))
    (batch,) = jb.sharding.prefetch_to_mesh([batch], mesh)
    with pytest.raises(ValueError) as refusal:
        steps(jb.sharding.replicate(np.float32(2), mesh), batch)
    message = str(refusal.value)
    assert "shape [16, 5] is outside the plan" in message
    assert all(str(bucket) in message for bucket in plan.buckets)


CHANGES = {
    "dtype": lambda x: {"x": x["x"].astype(jnp.float16)},
    "shape": lambda x: {"x": x["x"][:, :, None]},
    "missing": lambda x: {},
    "additional": lambda x: {"x": x["x"], "y": x["x"]},
    "renamed": lambda x: {"inputs": x["x"]},
}


@pytest.mark.parametrize("change", CHANGES)
def test_features_that_differ_from_the_plan_are_refused(compiled, change):
    steps, _, mesh, batches = compiled
    name = {"additional": "y", "renamed": "inputs"}.get(change, "x")
    for batch in batches.values():
        wrong = batch._replace(features=CHANGES[change](batch.features))
        with pytest.raises(ValueError, match=rf"`batch.features\['{name}'\]`"):
            steps(jb.sharding.replicate(np.float32(2), mesh), wrong)


# count_compiles


def test_count_compiles_stops_when_the_block_fails():
    def fivefold(x):
        return 5 * x

    with pytest.raises(KeyError), jb.compile.count_compiles() as compiles:
        jax.jit(fivefold)(np.zeros(2, np.float32))
        raise KeyError
    jax.jit(fivefold)(np.zeros(3, np.float32))
    assert compiles["fivefold"] == 1


# Concurrent compilation


def traced_step(name="slow", fails_at=None):
    """Returns a step, and the list of buckets for which it was traced so far."""
    order = []

    def step(state, batch):
        order.append(batch.bucket)
        if batch.bucket.seq_len == fails_at:
            raise ArithmeticError("this bucket has no program")
        return {"w": state["w"] + 1}, {"sum": (state["w"] * batch.features["x"]).sum()}

    step.__name__ = name
    return jax.jit(step), order


SHAPES = [(8, 4), (4, 8), (2, 16)]
ONE = jb.data_mesh(jax.devices()[:1])
SMALL = jb.BucketPlan.from_shapes(SHAPES)
X = {"x": np.ones(3, np.float32)}


def small_specs(example=X):
    return jb.sharding.batch_specs(SMALL, example, ONE)


def small_state():
    return jb.sharding.replicate({"w": np.float32(2)}, ONE)


def small_batch(bucket, example=X):
    (batch,) = jb.sharding.prefetch_to_mesh(
        [jb.data.collate_rows([example], bucket)], ONE
    )
    return batch


@pytest.mark.parametrize("workers", [None, 1, 5])
def test_any_number_of_workers_gives_the_same(workers):
    step, order = traced_step()
    steps = jb.compile_steps(step, small_state(), small_specs(), workers=workers)
    # The longest first, and in order, independent of the number of workers.
    assert order == list(reversed(SMALL.buckets))
    for bucket in SMALL.buckets:
        _, metrics = steps(small_state(), small_batch(bucket))
        assert metrics["sum"] == 6
    assert list(steps) == list(SMALL.buckets)
    assert {p.label for p in steps.report.programs} == set(map(str, SMALL.buckets))


def test_an_error_names_its_bucket():
    step, order = traced_step(fails_at=8)
    with pytest.raises(ArithmeticError, match="has no program") as failure:
        jb.compile_steps(step, small_state(), small_specs())
    assert failure.value.__notes__[-1] == "Raised while compiling `slow` for [4, 8]."
    # Later buckets are not traced.
    assert jb.Bucket(8, 4) not in order


FIRST = small_specs()[SMALL.buckets[0]]
REFUSED = [
    ("state", {"state": {"w": jax.ShapeDtypeStruct((), jnp.float32)}}),
    ("specs", {"specs": {}}),
    ("specs", {"specs": dict.fromkeys(SMALL.buckets, SMALL)}),
    ("specs", {"specs": dict.fromkeys(SMALL.buckets, FIRST)}),
    ("workers", {"workers": 0}),
    ("executables", {"executables": "gs://bucket/folder"}),
]


@pytest.mark.parametrize(("name", "given"), REFUSED)
def test_invalid_arguments_are_refused(name, given):
    step, order = traced_step()
    arguments = {"step_fn": step, "state": small_state(), "specs": small_specs()}
    with pytest.raises(ValueError, match=f"`{name}"):
        jb.compile_steps(**(arguments | given))
    assert not order


# Different states


def test_the_message_names_the_leaf_of_the_state_that_differs():
    step, _ = traced_step()
    steps = jb.compile_steps(step, small_state(), small_specs())
    batch = small_batch(SMALL.buckets[0])
    for state, message in [
        ({"w": np.float16(2)}, r"'state\['w'\]' compiled with float32\[\] .* float16"),
        ({"w": np.ones(3, "f4")}, r"'state\['w'\]' compiled with float32\[\]"),
        ({}, "'w'"),
        ({"w": np.float32(2), "v": np.float32(1)}, "'v'"),
    ]:
        with pytest.raises(ValueError, match=rf"(?s)\[8, 4\] was compiled.*{message}"):
            steps(jb.sharding.replicate(state, ONE), batch)


def test_the_message_says_how_to_evaluate_a_state_of_fine_tuning():
    def loss_fn(params, batch, keys):
        total = jnp.sum(batch.features["x"] * params["w"], where=batch.mask)
        return total + params["b"], batch.num_tokens

    params = {"w": np.float32(1), "b": np.float32(0)}
    state = jb.create_state(params, optax.adam(0.1), ONE)
    tuned = jb.create_state(state, optax.adam(0.1), ONE, wrt=nnx.PathContains("b"))
    step = jb.make_eval_step(loss_fn, ONE)
    batch = small_batch(SMALL.buckets[0])
    with pytest.raises(ValueError, match=r"(?s)frozen.*jb.create_state\(state, mesh"):
        jb.compile_steps(step, state, small_specs())(tuned, batch)
    bare = jb.create_state(state, mesh=ONE)
    steps = jb.compile_steps(step, bare, small_specs())
    assert steps(jb.create_state(tuned, mesh=ONE), batch) == steps(bare, batch)


def test_a_state_on_a_different_device_is_refused():
    step, _ = traced_step()
    steps = jb.compile_steps(step, small_state(), small_specs())
    other = jb.sharding.replicate(
        {"w": np.float32(2)}, jb.data_mesh(jax.devices()[1:2])
    )
    with pytest.raises(ValueError, match="sharding"):
        steps(other, small_batch(SMALL.buckets[0]))


# Reports


def test_the_report_has_seconds_and_bytes():
    def matmul_step(state, batch):
        x = batch.features["x"]

        def body(w, _):
            return w + x.T @ (x @ w), None

        w, _ = jax.lax.scan(body, state, None, length=7)
        return w, w.sum()

    plan = jb.BucketPlan.from_shapes([(8, 4), (4, 16)])
    specs = jb.sharding.batch_specs(plan, X, ONE)
    state = [jb.sharding.replicate(jnp.zeros((n, 5)), ONE) for n in (4, 16)]
    for bucket, first in zip(plan.buckets, state, strict=True):
        one = {bucket: specs[bucket]}
        steps = jb.compile_steps(jax.jit(matmul_step, donate_argnums=0), first, one)
        (program,) = steps.report.programs
        b, t = bucket.batch_size, bucket.seq_len
        # float32 features and weights, int32 ids and positions (unused ones left out).
        assert program.argument_bytes in range(
            4 * b * t + 20 * t, 12 * b * t + 20 * t + 1
        )
        assert program.aliased_bytes == 20 * t
        assert program.peak_bytes >= program.argument_bytes
        assert program.trace_seconds > 0 and program.compile_seconds > 0
        assert steps.seconds[bucket] == program.seconds
        (as_json,) = json.loads(steps.report.to_json())
        assert as_json["label"] == str(bucket)
        text = io.StringIO()
        Console(file=text, width=120).print(steps.report)
        assert f"matmul_step {bucket}" in text.getvalue()


def test_operations_of_all_devices_are_counted_in_all_modes():
    mesh = jb.data_mesh(jax.devices()[:2])
    plan = jb.BucketPlan.from_shapes([(8, 4)])
    specs = jb.sharding.batch_specs(plan, {"x": np.ones((3, 6), np.float32)}, mesh)

    def loss(params, batch, keys):
        return (batch.features["x"] @ params["w"]).sum(), batch.num_tokens

    flops = {}
    for mode in ("jit", "shard_map"):
        tx = optax.sgd(0.1)
        state = jb.create_state({"w": jnp.ones((6, 3))}, tx, mesh)
        step = jb.make_train_step(loss, tx, mesh, mode=mode)
        (program,) = jb.compile_steps(step, state, specs).report.programs
        flops[mode] = program.flops
    forward = 2 * 8 * 4 * 6 * 3
    # The gradient of the weights doubles the operations.
    assert flops == {"jit": 2 * forward, "shard_map": 2 * forward}


MATRIX = jnp.ones((4, 4))
PRODUCT = 2 * 4**3
OPERATIONS = {
    "a product": (lambda x: x @ x, PRODUCT),
    "none": (lambda x: x + x, 0),
    "a batch of products": (
        lambda x: jax.vmap(lambda y: x @ y)(jnp.ones((3, 4, 4))),
        3 * PRODUCT,
    ),
    "nested loops": (
        lambda x: jax.lax.fori_loop(
            0, 3, lambda _, y: jax.lax.fori_loop(0, 5, lambda _, z: z @ x, y), x
        ),
        15 * PRODUCT,
    ),
    "a loop of unknown length": (
        lambda x: jax.lax.while_loop(lambda y: y.sum() < 1e9, lambda y: y @ x, x),
        PRODUCT,
    ),
    "branches": (
        lambda x: jax.lax.cond(x.sum() > 0, lambda y: y @ y @ y, lambda y: y, x),
        2 * PRODUCT,
    ),
    "rematerialization": (
        lambda x: jax.grad(lambda y: jax.checkpoint(lambda z: jnp.sin(z @ x))(y).sum())(
            x
        ),
        3 * PRODUCT,
    ),
    "custom derivatives": (lambda x: jax.nn.relu(x @ x), PRODUCT),
    "a convolution in groups": (
        lambda x: jax.lax.conv_general_dilated(
            jnp.ones((2, 6, 8)),
            jnp.ones((4, 3, 2)),
            (1,),
            "VALID",
            feature_group_count=2,
        ),
        2 * (2 * 4 * 7) * (3 * 2),
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_are_counted(name):
    fn, want = OPERATIONS[name]
    assert count_flops(jax.jit(fn).trace(MATRIX).jaxpr) == want


def test_a_count_that_another_library_has_ended_is_reported():
    def sixfold(x):
        return 6 * x

    with (
        pytest.warns(UserWarning, match="not counted"),
        jb.compile.count_compiles() as compiles,
    ):
        jax.jit(sixfold)(np.zeros(2, np.float32))
        jax.monitoring.clear_event_listeners()
        jax.jit(sixfold)(np.zeros(3, np.float32))
    assert compiles["sixfold"] == 1


# jax's own cache


def test_xla_cache_turns_the_cache_of_jax_on(tmp_path):
    names = [x for x in jax.config.values if "persistent_cache" in x]
    names.append("jax_compilation_cache_dir")
    before = {name: jax.config.values[name] for name in names}
    hits = []
    jax.monitoring.register_event_listener(
        lambda event, **_: hits.append(event.endswith("/cache_hits"))
    )
    try:
        # The defaults of jax, with which small programs are not stored.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
        jb.compile.use_xla_cache(tmp_path)
        for count in (0, len(SMALL)):
            step, _ = traced_step("cached_by_jax")
            jb.compile_steps(step, small_state(), small_specs())
            assert sum(hits) == count
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    assert any(tmp_path.iterdir())
