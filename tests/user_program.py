"""A user's program: type checkers accept it, and know the types of what it gets.

`.ci/run` checks and runs it outside of the repository, where the wheel is installed.
"""

import tempfile
from collections.abc import Iterator
from typing import assert_type

import grain  # type: ignore[import-untyped]
import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from flax import nnx

import jaxbucket as jb

Metrics = dict[str, jax.Array]


def loss_fn(
    model: nnx.Sequential, batch: jb.Batch, keys: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    inputs, targets, weights = jb.next_tokens(batch)
    losses = optax.softmax_cross_entropy_with_integer_labels(model(inputs), targets)
    return jnp.sum(losses * weights), jnp.sum(weights)


def loss_with_keys(
    model: nnx.Sequential, batch: jb.Batch, keys: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return loss_fn(model, batch, keys)


def predict_fn(model: nnx.Sequential, batch: jb.Batch) -> dict[str, jax.Array]:
    return {"length": jb.attention.sequence_lengths(batch.segment_ids["tokens"])}


def main() -> None:
    source = [{"tokens": np.arange(n, dtype=np.uint8)} for n in (3, 5, 9, 4, 4, 7)]
    lengths = assert_type(jb.measure_lengths(source), np.ndarray)
    plan = jb.plan_buckets(lengths, max_tokens=64, num_buckets=2, seq_len_multiple=4)
    positions: int = sum(b.batch_size * b.seq_len for b in plan.buckets)
    print(jb.report(plan, lengths).summary, positions / plan.max_tokens)
    pairs = {"source": lengths, "target": lengths[::-1]}
    for bucket in jb.plan_buckets(pairs, max_tokens=64).buckets:
        sizes = bucket.seq_len
        print(bucket.batch_size * sizes["source"] * sizes["target"])
    print(jb.Limits(max_tokens=64, seq_len_multiple=4).batch_sizes([4, 8]))
    mesh = jb.data_mesh(jax.devices()[:1])
    schedule = jb.BatchSchedule(plan, lengths, order=jb.Curriculum(lengths), seed=0)
    batches = jb.MeshLoader(source, schedule, mesh)
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Embed(256, 8, rngs=rngs), nnx.Linear(8, 256, rngs=rngs))
    tx = optax.chain(optax.adamw(3e-3), jb.scale_by_batch_size(base_tokens=64))
    state = assert_type(jb.create_state(model, tx, mesh), jb.train.TrainState)
    step_fn = jb.make_train_step(loss_fn, tx, mesh)
    train_step = jb.compile_steps(step_fn, state, batches.specs)
    eval_step = jb.make_eval_step(loss_fn, mesh)
    jb.make_train_step(loss_with_keys, tx, mesh)
    jb.make_eval_step(loss_with_keys, mesh)
    with (
        jb.Processes() as processes,
        jb.StopRequest(processes) as stop,
        jb.Checkpoints(tempfile.mkdtemp(), processes=processes) as checkpoints,
    ):
        for step, batch in enumerate(batches, 1):
            assert_type(batch, jb.Batch)
            results = train_step(state, batch)
            state, metrics = assert_type(results, tuple[jb.train.TrainState, Metrics])
            print(step, batch.bucket.num_tokens, float(metrics["loss"]))
            assert_type(eval_step(state, batch), Metrics)
            if stop.before(step):
                break
        checkpoints.save(state, batches.position(len(batches)), {"loss": 1.0})
        restored, position, extra = checkpoints.restore(state)
    assert_type(restored, jb.train.TrainState)
    assert_type(batches.resume(position), jb.MeshLoader)
    predict_step = jb.make_predict_step(predict_fn, mesh)
    for outputs in jb.predict(predict_step, state, batches, sequences=[]):
        print(None if outputs is None else outputs["length"])
    choice = jb.plan_packing(lengths, max_tokens=64, pack="always")
    packed = jb.BatchSchedule(choice.plan, lengths, packing=choice.packing, seed=0)
    dataset = jb.batch_dataset(source, packed)
    # For mypy, because Grain has no types.
    loaded: Iterator[jb.Batch] = jb.data.load_in_workers(dataset, num_workers=0)
    print(choice.reason, [local.bucket for local in loaded])
    stream = grain.MapDataset.source(source).to_iter_dataset()
    for streamed in jb.stream_batches(stream, plan, pool_size=8):
        assert_type(streamed, jb.Batch)


if __name__ == "__main__":
    main()
