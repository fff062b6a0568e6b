"""Outputs of every example, against the model called on that example alone."""

import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from step_cases import MODES, make_mesh

import jaxbucket as jb

PARAMS = {"scale": np.float32(3.0)}


def predict_fn(params, batch):
    """Returns the running sum and the total of each example."""
    values = jnp.where(batch.mask, batch.features["values"], 0) * params["scale"]
    return {"running": jnp.cumsum(values, axis=1), "total": values.sum(axis=1)}


def expected(example):
    running = np.cumsum(example["values"] * PARAMS["scale"])
    return {"running": running, "total": running[-1]}


def make_job(order="shuffled", **options):
    rng = np.random.default_rng(0)
    # Sums of small integers are exact in any order.
    source = [
        {"values": rng.integers(-9, 9, n).astype(np.float32)}
        for n in rng.integers(1, 20, 150)
    ]
    lengths = jb.measure_lengths(source, progress=False)
    plan = jb.plan_buckets(
        lengths, max_tokens=320, num_buckets=3, batch_size_multiple=8, **options
    )
    return source, jb.BatchSchedule(plan, lengths, order=order)


def run(source, schedule, mesh, axes="data", mode="jit", compiled=True):
    step = jb.make_predict_step(predict_fn, mesh, mode=mode, batch_axes=axes)
    batches = jb.MeshLoader(source, schedule, mesh, batch_axes=axes)
    state = make_state(mesh)
    if compiled:
        step = jb.compile_steps(step, state, batches.specs, progress=False)
    return jb.predict(step, state, batches, sequences="running")


def make_state(mesh):
    return jb.create_state(PARAMS, optax.sgd(0.1), mesh)


def assert_same(outputs, examples):
    assert len(outputs) == len(examples)
    for got, example in zip(outputs, examples, strict=True):
        want = expected(example)
        assert got.keys() == want.keys()
        np.testing.assert_array_equal(got["running"], want["running"])
        assert got["total"] == want["total"]


@pytest.mark.parametrize(
    ("layout", "mode"), [("2x2x2", "jit"), ("2x2x2", "shard_map"), ("4x2", "pmap")]
)
def test_outputs_are_in_the_order_of_the_source(layout, mode):
    source, schedule = make_job()
    mesh, axes = make_mesh(layout)
    assert_same(run(source, schedule, mesh, axes, mode), source)


@pytest.mark.parametrize("mode", MODES)
def test_micro_batches_of_several_buckets_are_predicted(mode):
    """By steps that are not compiled ahead of time."""
    source, schedule = make_job()
    groups = jb.BatchSchedule(
        schedule.plan, schedule.lengths, accumulate=2, group="mixed"
    )
    mesh, _ = make_mesh("8")
    assert_same(run(source, groups, mesh, mode=mode, compiled=False), source)


def test_dropped_examples_are_none_and_truncated_ones_are_shorter():
    source, schedule = make_job(max_seq_len=10, overlong="drop")
    mesh, _ = make_mesh("8")
    outputs = run(source, schedule, mesh)
    kept = [i for i, example in enumerate(source) if len(example["values"]) <= 10]
    assert [i for i, output in enumerate(outputs) if output is not None] == kept
    assert_same([outputs[i] for i in kept], [source[i] for i in kept])
    source, schedule = make_job(max_seq_len=10, overlong="truncate")
    cut = [{"values": example["values"][:10]} for example in source]
    assert_same(run(source, schedule, mesh), cut)


def test_only_named_sequences_lose_their_padding():
    source, schedule = make_job()
    mesh, _ = make_mesh("1")
    step = jb.make_predict_step(predict_fn, mesh)
    batches = jb.MeshLoader(source, schedule, mesh)
    state = make_state(mesh)
    outputs = jb.predict(step, state, batches, sequences=[])
    lengths = {len(output["running"]) for output in outputs}
    assert lengths <= {bucket.seq_len for bucket in schedule.plan.buckets}
    # They must be outputs of shape `[B, T]`.
    for names in (["logits"], "logits", ["running", "total"]):
        with pytest.raises(ValueError, match="`sequences"):
            jb.predict(step, state, batches, sequences=names)


@pytest.mark.parametrize(
    ("sequences", "is_padded"),
    [([], True), ({"b": ["of_b"]}, False), ({"a": [], "b": ["of_b"]}, False)],
)
def test_outputs_need_not_have_all_sequences_of_the_examples(sequences, is_padded):
    rng = np.random.default_rng(0)
    source = [
        {"a": rng.normal(size=m), "b": rng.normal(size=n)}
        for m, n in rng.integers(1, 9, (30, 2))
    ]
    lengths = jb.measure_lengths(source, sequences={"a": ["a"], "b": ["b"]})
    plan = jb.plan_buckets(lengths, max_tokens=128, num_buckets=3)
    mesh, _ = make_mesh("1")
    batches = jb.MeshLoader(source, jb.BatchSchedule(plan, lengths), mesh)

    def both(params, batch):
        b = batch.features["b"]
        return {"sum": batch.features["a"].sum(axis=1), "of_b": 2 * b}

    step = jb.make_predict_step(both, mesh)
    outputs = jb.predict(step, make_state(mesh), batches, sequences=sequences)
    for output, example in zip(outputs, source, strict=True):
        np.testing.assert_allclose(output["sum"], example["a"].sum(), rtol=1e-5)
        of_b = output["of_b"][: len(example["b"])]
        np.testing.assert_allclose(of_b, 2 * example["b"], rtol=1e-6)
        assert is_padded or len(output["of_b"]) == len(example["b"])
    for wrong in (["of_b"], {"of_b": ["of_b"]}, {"b": ["sum"]}, {"b": ["missing"]}):
        with pytest.raises(ValueError, match="`sequences"):
            jb.predict(step, make_state(mesh), batches, sequences=wrong)


def test_type_hints_of_predict_can_be_resolved():
    assert typing.get_type_hints(jb.predict)["batches"] is jb.MeshLoader


def index_of(params, batch):
    return {"index": batch.features["index"]}


def indexed_job(lengths, **options):
    """Examples with a feature `index`, all in one bucket."""
    source = [{"x": np.ones(n), "index": np.int32(i)} for i, n in enumerate(lengths)]
    plan = jb.plan_buckets(lengths, max_tokens=64, boundaries=[8], overlong="drop")
    schedule = jb.BatchSchedule(plan, lengths, **options)
    return source, plan, schedule


ONE = jb.data_mesh(jax.devices()[:1])


def predicted(batches):
    step = jb.make_predict_step(index_of, ONE)
    outputs = jb.predict(step, make_state(ONE), batches, sequences=[])
    return [None if x is None else int(x["index"]) for x in outputs]


@pytest.mark.parametrize("options", [{}, {"accumulate": 3}, {"order": "descending"}])
def test_every_order_and_epoch_can_be_predicted(options):
    lengths = np.random.default_rng(0).integers(1, 10, 61)
    want = [i if length <= 8 else None for i, length in enumerate(lengths)]
    for seed in range(3):
        source, _, schedule = indexed_job(lengths, seed=seed, **options)
        for epoch in (0, 4):
            start = epoch * len(schedule)
            batches = jb.MeshLoader(source, schedule, ONE, start_step=start)
            assert predicted(batches) == want


def test_batches_must_be_exactly_one_epoch():
    source, _, schedule = indexed_job([3] * 40)
    epoch = len(schedule)
    for options in (
        {"start_step": 1},
        {"num_steps": epoch - 1},
        {"num_epochs": 2},
    ):
        batches = jb.MeshLoader(source, schedule, ONE, **options)
        with pytest.raises(ValueError, match="`batches`"):
            predicted(batches)


def test_a_schedule_that_repeats_or_leaves_out_examples_is_refused():
    lengths = np.arange(60) % 7 + 1
    source, plan, _ = indexed_job(lengths)
    order = jb.Curriculum(lengths, jb.schedule.LinearPacing(0.5, 2), replacement=True)
    half = jb.BatchSchedule(plan, lengths[:30])
    schedules = [
        jb.BatchSchedule(plan, lengths, order=order),
        jb.BatchSchedule(plan, lengths, remainder="drop"),
        jb.BatchSchedule(plan, lengths, remainder="repeat"),
        jb.Mixture([half, half], weights=[2, 1]),
    ]
    for schedule in schedules:
        with pytest.raises(ValueError, match="`batches`"):
            predicted(jb.MeshLoader(source, schedule, ONE))


def packed_job():
    source, schedule = make_job()
    source, lengths = source[:40], schedule.lengths[:40]
    choice = jb.plan_packing(
        lengths, max_tokens=256, pack="always", batch_size_multiple=8
    )
    schedule = jb.BatchSchedule(choice.plan, lengths, packing=choice.packing)
    assert schedule.max_segments > 1
    return source, schedule


def packed_predict_fn(params, batch):
    """The same outputs as `predict_fn`, from packed rows `[B, T]`."""
    (ids,), max_segments = batch.segment_ids.values(), packed_job()[1].max_segments
    values = jnp.where(batch.mask, batch.features["values"], 0) * params["scale"]
    same = ids[:, :, None] == jnp.arange(1, max_segments + 1)
    before = ids[:, :, None] == ids[:, None, :]
    before &= jnp.tril(jnp.ones(before.shape[1:], bool))
    # `[B, T]`, and `[B, S]` for the examples of a row.
    return {
        "running": jnp.einsum("bts,bs->bt", before.astype(values.dtype), values),
        "total": jnp.einsum("bts,bt->bs", same.astype(values.dtype), values),
    }


def test_outputs_of_packed_rows_are_those_of_their_examples():
    source, schedule = packed_job()
    mesh, _ = make_mesh("8")
    step = jb.make_predict_step(packed_predict_fn, mesh, mode="shard_map")
    batches = jb.MeshLoader(source, schedule, mesh)
    outputs = jb.predict(step, make_state(mesh), batches, sequences="running")
    assert_same(outputs, source)


def test_outputs_of_packed_rows_have_an_entry_for_each_example():
    source, schedule = packed_job()
    mesh, _ = make_mesh("8")
    batches = jb.MeshLoader(source, schedule, mesh)
    step = jb.make_predict_step(lambda p, b: {"x": b.features["values"][:, 0]}, mesh)
    with pytest.raises(ValueError, match="`max_segments="):
        jb.predict(step, make_state(mesh), batches, sequences=[])


@pytest.mark.parametrize(
    "outputs",
    [
        lambda p, b: b.features["values"],
        lambda p, b: {},
        lambda p, b: {"g": {"x": b.features["values"]}},
        lambda p, b: {"x": jnp.float32(3)},
        lambda p, b: {"x": b.features["values"].T},
    ],
)
def test_outputs_must_have_one_entry_per_row(outputs):
    source, schedule = make_job()
    mesh, _ = make_mesh("1")
    step = jb.make_predict_step(outputs, mesh)
    batch = next(iter(jb.MeshLoader(source, schedule, mesh)))
    with pytest.raises(ValueError, match="`predict_fn`"):
        step(make_state(mesh), batch)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("predict_fn", {"predict_fn": 3}),
        ("mode", {"mode": "vmap"}),
        ("batch_axes", {"batch_axes": "rows"}),
    ],
)
def test_wrong_options_are_refused(name, options):
    good = {"predict_fn": predict_fn, "mesh": jb.data_mesh()}
    with pytest.raises(ValueError, match=f"`{name}="):
        jb.make_predict_step(**{**good, **options})


IN_PROCESSES = """
import jax, jax.numpy as jnp, numpy as np, optax
import jaxbucket as jb
from jax.sharding import Mesh

def predict_fn(params, batch):
    values = jnp.where(batch.mask, batch.features["values"], 0) * params["scale"]
    return {"running": jnp.cumsum(values, axis=1), "total": values.sum(axis=1)}

with jb.Processes() as processes:
    source = [{"values": np.arange(n, dtype=np.float32)} for n in range(1, 60)]
    lengths = jb.measure_lengths(source, progress=False)
    plan = jb.plan_buckets(lengths, max_tokens=512, batch_size_multiple=8)
    schedule = jb.BatchSchedule(plan, lengths)
    devices = np.array(jax.devices())
    meshes = [
        Mesh(devices, ("data",)),
        Mesh(devices.reshape(2, 2), ("data", "model")),
        # Both processes have the same rows.
        Mesh(devices.reshape(2, 2).T, ("data", "model")),
    ]
    modes = [("jit", "pmap"), ("shard_map",), ("shard_map",)]
    for mesh, modes_of_mesh in zip(meshes, modes, strict=True):
        for mode in modes_of_mesh:
            step = jb.make_predict_step(predict_fn, mesh, mode=mode)
            params = {"scale": np.float32(3)}
            state = jb.create_state(params, optax.sgd(0.1), mesh)
            batches = jb.MeshLoader(source, schedule, mesh)
            steps = jb.compile_steps(step, state, batches.specs)
            outputs = jb.predict(steps, state, batches, sequences="running")
            for example, got in zip(source, outputs, strict=True):
                want = np.cumsum(3 * example["values"])
                np.testing.assert_array_equal(got["running"], want)
                assert got["total"] == want[-1]
            record(mesh.shape_tuple, mode)
        # Each process has different batches.
        other = jb.BatchSchedule(plan, lengths, seed=processes.index)
        batches = jb.MeshLoader(source, other, mesh)
        try:
            jb.predict(lambda state, batch: batch, None, batches, sequences=[])
        except ValueError as error:
            record(error)
"""


@pytest.mark.exhaustive
def test_every_process_has_all_outputs_in_order(launch):
    run = launch(IN_PROCESSES, count=2, devices=2)
    assert run.status == 0, run.output
    assert run.recorded(0) == run.recorded(1)
    recorded = run.recorded(0)
    refused = [line for line in recorded if "`batches` differ" in line]
    assert len(refused) == 3 and len(recorded) == 7
