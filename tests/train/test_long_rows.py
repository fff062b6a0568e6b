"""Rows that several devices share: steps equal those of one device, in every layout."""

import collections
import dataclasses
import functools
import importlib.util
import itertools
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxbucket as jb

WORDS, WIDTH, HEADS = 16, 32, 8
SLOW = pytest.mark.exhaustive
# On eight devices, rows have 1, 2, 4 and 8 of them.
SHAPES = [(8, 16), (4, 32), (2, 64), (1, 128)]
PLAN = jb.BucketPlan.from_shapes(SHAPES)
RNG = np.random.default_rng(0)
LENGTHS = np.concatenate(
    [RNG.integers(t // 2 + 1, t + 1, 3 * b) for b, t in SHAPES], dtype=np.int32
)
SOURCE = [
    {
        "tokens": RNG.integers(1, WORDS, n).astype(np.int32),
        "image": RNG.random((3, 5)),
        "weight": np.float64(i % 3 + 1),
    }
    for i, n in enumerate(LENGTHS.tolist())
]


def make_params():
    rng = np.random.default_rng(1)
    shapes = {"words": (WORDS, WIDTH), "qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WORDS)}
    return {name: rng.standard_normal(shape) / 4 for name, shape in shapes.items()}


def with_mask(query, key, value, ids, *, is_causal):
    """Attention that does not know of devices, with a softmax in float64."""
    places = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    mask = jb.attention.attention_mask(ids, places if is_causal else None)
    logits = jnp.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(query.shape[-1])
    weights = jax.nn.softmax(jnp.where(mask, logits, -1e30))
    output = jnp.einsum("bnts,bsnh->btnh", weights, value)
    return jnp.where(ids[..., None, None] > 0, output, 0)


def make_loss(attend, *, is_causal):
    def loss_fn(params, batch, keys):
        inputs, targets, weights = jb.next_tokens(batch, "tokens")
        x = params["words"][inputs]
        heads = (x @ params["qkv"]).reshape(*x.shape[:2], HEADS, -1)
        heads = jnp.split(heads, 3, axis=-1)
        x += attend(*heads, batch.segment_ids["tokens"], is_causal=is_causal).reshape(
            x.shape
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(
            x @ params["out"], targets
        )
        if keys is not None:
            noise = jax.vmap(lambda key: jax.random.uniform(key, x.shape[1:2]))(keys)
            losses *= 0.9 + noise.astype(losses.dtype)
        if batch.features["image"].ndim == 3:
            losses *= batch.features["image"].mean((1, 2))[:, None]
        return jnp.sum(losses * weights), jnp.sum(weights)

    return loss_fn


def make_schedule(plan):
    if plan is not None:
        return jb.BatchSchedule(plan, LENGTHS, seed=3)
    limits = jb.plan.device_limits(8, 32, max_row_shards=8)
    choice = jb.plan_packing(LENGTHS, pack="always", num_buckets=4, **limits)
    return jb.BatchSchedule(choice.plan, LENGTHS, packing=choice.packing, seed=3)


def train(mesh, attend, *, is_causal=True, plan=PLAN, sharded=False, num_steps=50):
    """Returns losses, gradient norms, parameters and the layouts of the batches.

    Rows are packed if there is no plan.
    """
    tx = optax.adam(1e-2)
    schedule = make_schedule(plan)
    batches = jb.MeshLoader(SOURCE, schedule, mesh, sequences=["tokens"])
    sharding = jb.sharding.fully_sharded(mesh) if sharded else None
    state = jb.create_state(make_params(), tx, mesh, sharding=sharding)
    state_sharding = jax.tree.map(lambda x: x.sharding, state)
    loss_fn = make_loss(attend, is_causal=is_causal)
    step = jb.make_train_step(loss_fn, tx, mesh, state_sharding=state_sharding, seed=7)
    steps = jb.compile_steps(step, state, batches.specs, progress=False)
    layouts, results, places = {}, [], None
    for batch in itertools.islice(batches, num_steps):
        layouts[str(batch.bucket)] = batch.mask.sharding.spec
        state, metrics = steps(state, batch)
        results.append((float(metrics["loss"]), float(metrics["grad_norm"])))
        # The first step may copy arrays that share memory with others.
        places = places or addresses(state.params)
    assert addresses(state.params) == places
    shardings = [executable.input_shardings[0][0] for executable in steps.values()]
    assert all(x == shardings[0] for x in shardings)
    evaluate = jb.make_eval_step(loss_fn, mesh)
    results.append((float(evaluate(state, batch)["loss"]), 0.0))
    return np.array(results), jax.tree.map(np.asarray, state.params), layouts


def addresses(params):
    return [
        shard.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves(params)
        for shard in leaf.addressable_shards
    ]


@functools.cache
def on_one_device(**options):
    return train(jb.data_mesh(jax.devices()[:1]), with_mask, **options)


@pytest.fixture(autouse=True)
def float64():
    # optax mixes int32 counts with floats, which strict promotion refuses.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


LAYOUTS = {
    "[8, 16]": PartitionSpec(("data", "row1", "row2", "row3")),
    "[4, 32]": PartitionSpec(("data", "row1", "row2"), "row3"),
    "[2, 64]": PartitionSpec(("data", "row1"), ("row2", "row3")),
    "[1, 128]": PartitionSpec("data", ("row1", "row2", "row3")),
}


@pytest.mark.parametrize(
    ("is_causal", "plan", "sharded"),
    [
        (False, jb.BucketPlan.from_shapes(SHAPES[1::2]), True),
        pytest.param(False, PLAN, True, marks=SLOW),
        # Causal attention over padded rows is that of two processes, below.
        pytest.param(True, None, False, marks=SLOW),
    ],
)
def test_steps_equal_those_of_one_device(is_causal, plan, sharded):
    mesh = jb.data_mesh(max_row_shards=8)
    options = {"is_causal": is_causal, "plan": plan}
    result, params, layouts = train(
        mesh, jb.segment_attention, sharded=sharded, **options
    )
    if plan is None:
        assert any(len(spec) == 2 for spec in layouts.values())
    else:
        assert layouts == {str(x): LAYOUTS[str(x)] for x in plan.buckets}
    expected, expected_params, _ = on_one_device(**options)
    np.testing.assert_allclose(result, expected, rtol=1e-12, atol=1e-13)
    for name, value in expected_params.items():
        np.testing.assert_allclose(params[name], value, rtol=1e-9, atol=1e-11)


def collectives(text):
    """Returns the number of collectives of each kind, and the largest array."""
    counts, largest = collections.Counter(), collections.Counter()
    pattern = (
        r" = (.*?) (all-to-all|all-gather|all-reduce|collective-permute)(-start)?\("
    )
    for result, kind, _ in re.findall(pattern, text):
        counts[kind] += 1
        for shape in re.findall(r"\[([\d,]*)\]", result):
            size = int(np.prod([int(x) for x in shape.split(",") if x], initial=1))
            largest[kind] = max(largest[kind], size)
    return counts, largest


def specs_of(plan, mesh):
    return jb.sharding.batch_specs(plan, SOURCE[0], mesh, sequences=["tokens"])


def make_step(mesh, **options):
    """Returns a causal step with plain SGD, and its first state."""
    tx, loss_fn = optax.sgd(0.1), make_loss(jb.segment_attention, is_causal=True)
    step = jb.make_train_step(loss_fn, tx, mesh, **options)
    return step, jb.create_state(make_params(), tx, mesh)


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs jaxbucket[tpu]"
)
def test_the_kernel_of_tpus_is_in_the_program_of_every_layout():
    """In mode "jit" too, because attention tells the compiler how it is divided."""
    with jax.enable_x64(False), jb.compile.absent_devices("v5e:2x4"):
        mesh, tx = jb.data_mesh(max_row_shards=8), optax.sgd(0.1)
        plan = jb.BucketPlan.from_shapes([(8 // c, 128 * c) for c in (1, 2, 4, 8)])
        specs = specs_of(plan, mesh)
        params = {"words": jax.ShapeDtypeStruct((WORDS, 1024), jnp.bfloat16)}
        state = jb.create_state(params, tx, mesh)

        def loss_fn(params, batch, keys):
            x = params["words"][batch.features["tokens"]]
            heads = x.reshape(*x.shape[:2], HEADS, -1)
            ids = batch.segment_ids["tokens"]
            mixed = jb.segment_attention(heads, heads, heads, ids, is_causal=True)
            losses = jnp.square(mixed.astype(jnp.float32)).mean((2, 3))
            return jnp.sum(losses, where=batch.mask), batch.num_tokens

        step = jb.make_train_step(loss_fn, tx, mesh)
        steps = jb.compile_steps(step, state, specs, progress=False)
    reports = {report.label: report for report in steps.report.programs}
    for bucket, executable in steps.items():
        # Forward, and for the gradients of the queries and of keys and values.
        assert executable.as_text().count("tpu_custom_call") == 3
        is_cut = "all-to-all" in reports[str(bucket)].collectives
        assert is_cut == (bucket.batch_size < 8)


@SLOW
def test_a_cut_row_needs_no_more_memory_and_no_other_collectives():
    mesh = jb.data_mesh(max_row_shards=8)
    step, state = make_step(mesh)
    plan = jb.BucketPlan.from_shapes([(8 // c, 512 * c) for c in (1, 2, 4, 8)])
    steps = jb.compile_steps(step, state, specs_of(plan, mesh), progress=False)
    temporary = {}
    for bucket, executable in steps.items():
        temporary[bucket.batch_size] = executable.memory_analysis().temp_size_in_bytes
        counts, largest = collectives(executable.as_text())
        activation = bucket.num_tokens // 8 * WIDTH
        if bucket.batch_size == 8:
            assert not counts["all-to-all"]
            assert not counts["all-gather"]
            continue
        # Query, key, value and output, forward and backward.
        assert counts["all-to-all"] == 8
        assert largest["all-to-all"] <= activation
        # Of segment ids.
        assert largest["all-gather"] <= bucket.num_tokens
        assert largest["collective-permute"] <= 4 * bucket.batch_size
        num_params = max(x.size for x in make_params().values())
        assert largest["all-reduce"] <= num_params
    assert temporary[1] <= 1.1 * temporary[8]


@SLOW
@pytest.mark.parametrize(
    ("wrap", "accumulate"), [(jax.jit, True), (jax.checkpoint, False)]
)
def test_blocks_that_jax_has_traced_before_exchange_heads(wrap, accumulate):
    mesh, tx = jb.data_mesh(max_row_shards=8), optax.sgd(0.1)
    state = jb.create_state(make_params(), tx, mesh)
    plan = jb.BucketPlan.from_shapes([(1, 128)])
    specs = specs_of(plan, mesh)

    def collectives_of(attend):
        def block(*heads, is_causal):
            return attend(*heads)

        loss_fn = make_loss(block, is_causal=True)
        step = jb.make_train_step(loss_fn, tx, mesh, accumulate=accumulate)
        steps = jb.compile_steps(step, state, specs, progress=False)
        return collectives(steps[plan.buckets[0]].as_text())

    def new_block():
        return wrap(functools.partial(jb.segment_attention, is_causal=True))

    known = new_block()
    # Traced without a layout first.
    jax.eval_shape(known, *[jnp.ones((1, 128, 8, 4))] * 3, jnp.ones((1, 128), int))
    counts, largest = collectives_of(known)
    assert (counts, largest) == collectives_of(new_block())
    # With `jax.checkpoint`, the backward pass exchanges heads and gathers segment ids
    # again, unless XLA merges the two.
    assert counts["all-to-all"] >= 8
    assert largest["all-gather"] <= plan.buckets[0].num_tokens
    if wrap is jax.jit:
        assert counts["all-gather"] == 1


def test_steps_are_called_like_jitted_functions():
    mesh = jb.data_mesh(max_row_shards=8)
    step, state = make_step(mesh)
    batch = specs_of(PLAN, mesh)[PLAN.buckets[0]]
    assert jax.eval_shape(step, state, batch) == jax.eval_shape(
        step, state=state, batch=batch
    )
    assert step.lower(state, batch=batch).as_text().count("all_to_all") == 0
    with pytest.raises(TypeError, match="batch"):
        step(state)


def test_a_batch_of_another_mesh_of_the_same_devices_exchanges_heads_too():
    step, state = make_step(jb.data_mesh())
    specs = specs_of(PLAN, jb.data_mesh(max_row_shards=8))
    lowered = step.lower(state, specs[PLAN.buckets[-1]])
    assert lowered.as_text().count("all_to_all") == 8


@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
def test_other_modes_refuse_rows_that_devices_share(mode):
    mesh = jb.data_mesh(max_row_shards=8)
    step, state = make_step(mesh, mode=mode)
    specs = specs_of(PLAN, mesh)
    step.lower(state, specs[PLAN.buckets[0]])
    for bucket in PLAN.buckets[1:]:
        with pytest.raises(ValueError, match="devices share each row"):
            step.lower(state, specs[bucket])


def test_shard_map_refuses_a_state_that_it_would_gather():
    mesh = jb.data_mesh()
    step, state = make_step(mesh, mode="shard_map")
    sharded = NamedSharding(mesh, PartitionSpec("data"))
    words = jax.device_put(state.params["words"], sharded)
    state = dataclasses.replace(state, params={**state.params, "words": words})
    specs = specs_of(jb.BucketPlan.from_shapes(SHAPES[:1]), mesh)
    with pytest.raises(ValueError, match=r"state.*words"):
        step.lower(state, specs[PLAN.buckets[0]])
    with pytest.raises(ValueError, match="`state_sharding`"):
        make_step(mesh, mode="shard_map", state_sharding=sharded)


SCRIPT = f"""
import json, sys
sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
import jax, numpy as np, jaxbucket as jb
with jb.Processes() as processes:
    import test_long_rows as test
    with jax.enable_x64(True):
        mesh = jb.data_mesh(max_row_shards=8)
        results, params, layouts = test.train(mesh, jb.segment_attention)
        rows = [jb.sharding.local_rows(mesh).of(b).rows(b.batch_size).tolist()
                for b in test.PLAN.buckets]
    # Each process has one row of both.
    refused = ""
    try:
        buckets = [jb.Bucket(1, 64), jb.Bucket(2, 64)]
        jb.sharding.prefetch_to_mesh([], mesh, buckets=buckets)
    except ValueError as error:
        refused = str(error)
    record(json.dumps([results.tolist(), rows, refused]))
"""


@SLOW
def test_rows_shared_by_two_processes(launch):
    launched = launch(SCRIPT, count=2, devices=4)
    assert launched.status == 0, launched.output
    expected, _, _ = on_one_device(is_causal=True)
    rows = []
    for index in range(2):
        results, of_process, refused = json.loads(launched.recorded(index)[0])
        assert "Choose one B for T = 64" in refused
        np.testing.assert_allclose(results, expected, rtol=1e-12, atol=1e-13)
        rows.append(of_process)
    assert rows == [
        [[0, 1, 2, 3], [0, 1], [0], [0]],
        [[4, 5, 6, 7], [2, 3], [1], [0]],
    ]
