"""The display and the records of the steps of a run."""

import importlib
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbucket as jb

END_TO_END = pathlib.Path(__file__).parents[2] / "benchmarks" / "end_to_end"


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(END_TO_END)
    return importlib.import_module("live")


def on_mesh(batch: jb.Batch, devices: int = 1) -> jb.Batch:
    (placed,) = jb.sharding.prefetch_to_mesh(
        [batch], jb.data_mesh(jax.devices()[:devices])
    )
    return placed


def make_batch(bucket: jb.Bucket, value: int = 1) -> jb.Batch:
    row = {"x": np.full(bucket.seq_len, value, np.int32)}
    return jb.data.collate_rows([row] * bucket.batch_size, bucket)


def metrics_of(batch: jb.Batch) -> dict[str, jax.Array]:
    return {
        "loss_sum": jnp.float32(2) * batch.num_tokens.astype(jnp.float32),
        "weight": batch.num_tokens,
        "learning_rate": jnp.float32(batch.bucket.batch_size / 64),
    }


def train(live, batches, step=metrics_of, **options):
    clock = live.Clock()
    clock.start()
    options = {"num_steps": len(batches), "seconds": None} | options
    with live.TrainingLog(clock, **options) as log:
        for batch in batches:
            log.add(batch, step(batch))
    return log


def test_every_step_is_recorded_once_with_its_own_numbers(live):
    buckets = [jb.Bucket(8, 4), jb.Bucket(4, 8), jb.Bucket(8, 4)] * 4
    log = train(live, [on_mesh(make_batch(bucket)) for bucket in buckets])
    assert [record.step for record in log.records] == list(range(12))
    assert [record.bucket for record in log.records] == buckets
    for record in log.records:
        assert (record.loss, record.real_tokens) == (2, 32)
        assert record.learning_rate == record.bucket.batch_size / 64
    assert log.done == 1
    assert [line["step"] for line in log.lines][-1] == 12
    shown = [line["real_tokens"] for line in log.lines]
    assert sum(shown) == 12 * 32


def test_evaluation_between_steps_does_not_count_as_training(live):
    clock = live.Clock(5.0)
    clock.start()
    batch = on_mesh(make_batch(jb.Bucket(1, 4)))
    options = {"num_steps": 2, "seconds": None}
    with live.TrainingLog(clock, **options) as log:
        log.add(batch, metrics_of(batch))
        with log.paused():
            assert log.step == 1
            before = log.seconds
            time.sleep(0.3)
            assert log.seconds == before >= 5
        log.add(batch, metrics_of(batch))
    assert log.records[1].seconds < 0.3


def digest_of(live, batches, first=0, before="0"):
    digest = live.BatchDigest(jb.Processes(), before)
    for step, batch in enumerate(batches, first):
        digest.add(batch, step)
    return digest.total()


def test_the_digest_covers_every_batch_on_any_number_of_devices(live):
    batches = [make_batch(jb.Bucket(8, 4), value) for value in (1, 2, 3)]
    whole = {digest_of(live, [on_mesh(b, n) for b in batches]) for n in (1, 2, 8)}
    assert len(whole) == 1
    swapped = digest_of(live, map(on_mesh, [batches[1], batches[0], batches[2]]))
    cut = digest_of(live, map(on_mesh, batches[:2]))
    assert len({*whole, swapped, cut}) == 3
    assert digest_of(live, [on_mesh(batches[2])], 2, before=cut) in whole
