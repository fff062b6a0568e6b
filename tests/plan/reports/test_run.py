import dataclasses
import json

import numpy as np
import pytest

from jaxbucket import Bucket
from jaxbucket.plan.costs import StepTime
from jaxbucket.plan.reports.run import StepRecord, bucket_stats


def random_records(seed: int) -> list[StepRecord]:
    rng = np.random.default_rng(seed)
    buckets = [Bucket(8, 4), Bucket(4, 8), Bucket(4, 16)]
    return [
        StepRecord(
            step,
            buckets[int(rng.integers(3))],
            float(rng.uniform(0.1, 0.4)),
            float(rng.uniform(1, 3)),
            int(rng.integers(1, 33)),
            1e-3,
        )
        for step in range(40)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_the_buckets_add_up_to_the_run(seed):
    records = random_records(seed)
    stats = bucket_stats(records)
    assert [x.bucket.seq_len for x in stats] == [4, 8, 16]
    assert sum(x.steps for x in stats) == 40
    for name in ("seconds", "real_tokens"):
        total = sum(getattr(record, name) for record in records)
        assert sum(getattr(x, name) for x in stats) == pytest.approx(total)
    padded = sum(x.steps * x.bucket.num_tokens * x.padding for x in stats)
    real = sum(record.real_tokens for record in records)
    assert padded == pytest.approx(sum(r.bucket.num_tokens for r in records) - real)
    for x in stats:
        own = [record.seconds for record in records if record.bucket == x.bucket]
        assert x.seconds_per_step == np.median(own)
        tokens = np.repeat(
            [r.loss for r in records if r.bucket == x.bucket],
            [r.real_tokens for r in records if r.bucket == x.bucket],
        )
        # The mean over tokens, not over steps.
        assert x.loss == pytest.approx(tokens.mean())
        assert x.seconds_per_token == np.median(own) / x.bucket.num_tokens
        assert json.loads(json.dumps(x.to_dict()))["bucket"] == list(
            dataclasses.astuple(x.bucket)
        )


def test_step_times_are_fitted_to_the_steps_of_a_run():
    cost = StepTime(0.01, 1e-4, 1e-6)
    shapes = [Bucket(16, 8), Bucket(8, 16), Bucket(4, 32), Bucket(2, 64), Bucket(2, 8)]
    records = [
        StepRecord(n, shape, cost(shape.batch_size, shape.seq_len), 1.0, 8, 0.1)
        for n, shape in enumerate(shapes * 3)
    ]
    fitted = StepTime.fit({u.bucket: u.seconds_per_step for u in bucket_stats(records)})
    assert fitted(4, 48) == pytest.approx(cost(4, 48))


def test_a_bucket_without_tokens_has_no_loss():
    (x,) = bucket_stats([StepRecord(0, Bucket(2, 8), 0.1, 0.0, 0, 0.1)])
    assert np.isnan(x.loss) and x.padding == 1
    assert x.to_dict()["loss"] is None


def test_a_run_without_steps_has_no_buckets():
    assert bucket_stats([]) == []
