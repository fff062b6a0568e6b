"""Two stages train as one model does, on micro-batches of one bucket."""

import importlib
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxbucket as jb

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
STEPS = 12


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("pipeline")


def groups(mesh) -> list[tuple[jb.Batch, ...]]:
    """Returns steps of four micro-batches. The last ones of a bucket may be empty."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 40, 84)
    source = [{"tokens": rng.integers(0, 256, n).astype("u1")} for n in lengths]
    plan = jb.plan_buckets(
        lengths, max_tokens=160, num_buckets=2, batch_size_multiple=2
    )
    schedule = jb.BatchSchedule(plan, lengths, accumulate=4, group="same")
    assert any(not batch.num_examples for micro in schedule for batch in micro), (
        "no micro-batch is empty"
    )
    dataset = jb.batch_dataset(
        source, schedule, shard=jb.sharding.local_rows(mesh), num_steps=STEPS
    )
    return list(jb.sharding.prefetch_to_mesh(dataset, mesh))


def losses(pipeline, loss_fn, stages, batches, mesh) -> list[float]:
    tx = optax.adamw(3e-3)
    step = pipeline.make_step(loss_fn, tx)
    state, values = pipeline.init(tx, stages, mesh), []
    # Adam's bias correction is a float to the power of an integer.
    with jax.numpy_dtype_promotion("standard"):
        for micro in batches:
            stages, state, loss = step(stages, state, micro)
            values.append(float(loss))
    return values


@pytest.mark.exhaustive
def test_stages_have_the_losses_of_the_whole_model(pipeline):
    mesh = jax.make_mesh(
        (2, 2),
        ("data", "stage"),
        axis_types=(jax.sharding.AxisType.Auto,) * 2,
        devices=jax.devices()[:4],
    )
    model = pipeline.Transformer(32, 4, 0.0, nnx.Rngs(0))
    shared, stages = pipeline.split_into_stages(model, 2)
    # A copy, because the steps donate the original.
    whole = jax.device_get(stages)
    batches = groups(mesh)
    with jb.compile.count_compiles() as compiles:
        values = losses(
            pipeline,
            pipeline.pipelined_loss(shared, mesh),
            pipeline.shard_stages(stages, mesh),
            batches,
            mesh,
        )
    # Once for each bucket, with or without empty micro-batches.
    assert compiles["pipeline_step"] == len({micro[0].bucket for micro in batches})
    local = [jax.device_get(micro) for micro in batches]
    alone = jb.data_mesh(jax.devices()[:1])
    whole = jax.device_put(whole)
    plain = losses(pipeline, pipeline.plain_loss(shared), whole, local, alone)
    np.testing.assert_allclose(values, plain, rtol=1e-5)
    assert values[-1] < values[0]


@pytest.mark.exhaustive
def test_the_plain_loss_equals_that_of_the_transformer(pipeline):
    (micro, *_) = groups(jb.data_mesh(jax.devices()[:1]))
    model = pipeline.Transformer(32, 4, 0.0, nnx.Rngs(0))
    nats = tokens = 0.0
    for batch in micro:
        targets = batch.features["tokens"].astype(jnp.int32)
        # The first byte is predicted from `BEGIN`, 256.
        positions = batch.positions["tokens"]
        inputs = jnp.where(positions == 0, 256, jnp.roll(targets, 1, axis=1))
        logits = model(inputs, positions, None)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        nats += float(jnp.sum(each, where=batch.mask))
        tokens += float(batch.num_tokens)
    shared, stages = pipeline.split_into_stages(model, 2)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *micro)
    values = float(pipeline.plain_loss(shared)(stages, stacked))
    np.testing.assert_allclose(values, nats / tokens, rtol=1e-6)


@pytest.mark.exhaustive
def test_the_example_runs_as_a_user_starts_it():
    run = subprocess.run(
        [
            *(sys.executable, "-W", "error", EXAMPLES / "pipeline.py"),
            *("--devices", "4", "--width", "16", "--steps", "3", "--max-len", "64"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "4 micro-batches" in run.stdout and "step    2" in run.stdout
