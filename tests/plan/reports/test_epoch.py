import dataclasses
import io
import json

import numpy as np
import pytest
from rich.console import Console

from jaxbucket import BatchSchedule, Bucket, BucketPlan, plan_buckets, report
from jaxbucket.plan.costs import StepTime
from jaxbucket.plan.reports.epoch import StepRecord, bucket_uses


def check_report(
    plan: BucketPlan, lengths: np.ndarray, remainder: str = "cheapest"
) -> None:
    """Every number, against a walk through one epoch of the schedule."""
    epoch = report(plan, lengths, remainder=remainder)
    batches = list(BatchSchedule(plan, lengths, seed=5, remainder=remainder))
    used = np.minimum(lengths, plan.max_seq_len)
    rows = np.concatenate([batch.rows for batch in batches])
    rows = rows[rows >= 0]
    padded = sum(batch.bucket.num_tokens for batch in batches)
    empty = sum(
        (batch.bucket.batch_size - batch.num_examples) * batch.bucket.seq_len
        for batch in batches
    )
    assert epoch.steps_per_epoch == len(batches)
    assert epoch.examples == len(rows)
    assert epoch.real_tokens == used[rows].sum()
    assert epoch.padded_tokens == padded
    assert epoch.padding == pytest.approx(1 - used[rows].sum() / padded)
    assert epoch.padding_in_empty_rows == pytest.approx(empty / padded)
    assert epoch.padding_in_rows + epoch.padding_in_empty_rows == pytest.approx(
        epoch.padding
    )
    over = lengths > plan.max_seq_len
    cut = plan.overlong == "truncate"
    assert epoch.dropped_examples == (0 if cut else over.sum())
    assert epoch.truncated_examples == (over.sum() if cut else 0)
    assert epoch.truncated_tokens == ((lengths - used).sum() if cut else 0)
    for bucket, own in zip(plan.buckets, epoch.buckets, strict=True):
        check_bucket(plan, lengths, bucket, own, batches)


def check_bucket(plan, lengths, bucket, own, batches) -> None:
    index = plan.buckets.index(bucket)
    mine = [batch for batch in batches if batch.bucket == bucket]
    fit = np.minimum(lengths[plan.assign(lengths) == index], bucket.seq_len)
    rows = np.concatenate([batch.rows for batch in mine] or [np.zeros(0, int)])
    assert (own.batch_size, own.seq_len) == (bucket.batch_size, bucket.seq_len)
    assert own.batches == len(mine)
    assert own.examples == len(fit)
    assert own.empty_rows == np.count_nonzero(rows == -1)
    came_up = plan.assign(lengths)[rows[rows >= 0]] < index
    # What came up is here, unless it went further up.
    assert own.carried >= came_up.sum()
    wasted = 1 - fit.sum() / (len(fit) * bucket.seq_len) if len(fit) else 0
    assert own.padding == pytest.approx(wasted)
    total = sum(batch.bucket.num_tokens for batch in batches)
    assert own.token_share == pytest.approx(len(mine) * bucket.num_tokens / total)


@pytest.mark.parametrize("remainder", ["cheapest", "promote", "pad"])
def test_a_report_counts_what_the_schedule_does(problem, remainder):
    check_report(*problem, remainder)


def test_a_report_counts_what_is_left_over():
    plan = BucketPlan((Bucket(4, 8), Bucket(2, 16)), max_tokens=32)
    found = report(plan, [6] * 11 + [16] * 5, remainder="drop")
    assert (found.left_over_examples, found.examples) == (4, 12)
    assert [bucket.left_over for bucket in found.buckets] == [3, 1]
    assert (found.real_tokens, found.padded_tokens) == (6 * 8 + 16 * 4, 4 * 32)
    assert "4 examples fill no batch: left out of an epoch." in found.summary


def test_a_report_counts_what_happens_to_real_lengths(real_lengths):
    last = int(np.percentile(real_lengths, 90))
    for overlong in ("drop", "truncate"):
        plan = plan_buckets(
            real_lengths,
            max_tokens=16 * last,
            num_buckets=6,
            max_seq_len=last,
            overlong=overlong,
        )
        check_report(plan, real_lengths)


def test_examples_that_come_up_are_counted_where_they_come():
    plan = BucketPlan((Bucket(4, 8), Bucket(2, 16)), max_tokens=32)
    short, long = report(plan, [8, 8, 8, 8, 6, 10]).buckets
    assert (short.carried, long.carried) == (0, 1)
    assert (short.empty_rows, long.empty_rows) == (0, 0)


def test_a_report_on_other_lengths_than_planned_for():
    plan = BucketPlan((Bucket(6, 10), Bucket(2, 30)), max_tokens=60)
    # 100 rows of one token: 16 full batches, and 4 rows of a 17th or of two longer.
    assert report(plan, [1] * 100).padding == pytest.approx(1 - 100 / (17 * 60))


def test_every_number_is_in_the_json():
    plan = BucketPlan((Bucket(6, 10), Bucket(2, 30)), max_tokens=60)
    epoch = report(plan, [10, 20, 30])
    fields = json.loads(epoch.to_json())
    assert fields == json.loads(json.dumps(epoch.to_dict()))
    assert fields["steps_per_epoch"] == 2
    assert fields["buckets"][1]["seq_len"] == 30


def test_the_table_has_a_line_for_every_bucket():
    lengths = np.random.default_rng(0).integers(1, 100, 500)
    plan = plan_buckets(lengths, max_tokens=800, num_buckets=4)
    terminal = io.StringIO()
    Console(file=terminal, width=100).print(report(plan, lengths))
    text = terminal.getvalue()
    for bucket in report(plan, lengths).buckets:
        assert f"{bucket.batch_size} " in text
        assert f" {bucket.examples} " in text
    assert report(plan, lengths).summary.splitlines()[0] in text


def test_what_is_lost_is_said():
    for overlong, words in (
        ("drop", "2 examples are too long: dropped."),
        ("truncate", "2 examples are too long: cut by 14 tokens."),
    ):
        plan = BucketPlan((Bucket(1, 8),), max_tokens=8, overlong=overlong)
        assert words in report(plan, [8, 10, 20]).summary
    plan = BucketPlan((Bucket(1, 20),), max_tokens=20)
    assert "too long" not in report(plan, [8, 10, 20]).summary


# Steps that were run


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
def test_uses_of_buckets_add_up_to_the_run(seed):
    records = random_records(seed)
    uses = bucket_uses(records)
    assert [use.bucket.seq_len for use in uses] == [4, 8, 16]
    assert sum(use.steps for use in uses) == 40
    for name in ("seconds", "real_tokens"):
        total = sum(getattr(record, name) for record in records)
        assert sum(getattr(use, name) for use in uses) == pytest.approx(total)
    padded = sum(use.steps * use.bucket.num_tokens * use.padding for use in uses)
    real = sum(record.real_tokens for record in records)
    assert padded == pytest.approx(sum(r.bucket.num_tokens for r in records) - real)
    for use in uses:
        own = [record.seconds for record in records if record.bucket == use.bucket]
        assert use.seconds_per_step == np.median(own)
        tokens = np.repeat(
            [r.loss for r in records if r.bucket == use.bucket],
            [r.real_tokens for r in records if r.bucket == use.bucket],
        )
        # That of every token, not the mean over steps.
        assert use.loss == pytest.approx(tokens.mean())
        assert use.seconds_per_token == np.median(own) / use.bucket.num_tokens
        assert json.loads(json.dumps(use.to_dict()))["bucket"] == list(
            dataclasses.astuple(use.bucket)
        )


def test_steps_of_a_run_are_what_the_next_plan_is_made_of():
    cost = StepTime(0.01, 1e-4, 1e-6)
    shapes = [Bucket(16, 8), Bucket(8, 16), Bucket(4, 32), Bucket(2, 64), Bucket(2, 8)]
    records = [
        StepRecord(n, shape, cost(shape.batch_size, shape.seq_len), 1.0, 8, 0.1)
        for n, shape in enumerate(shapes * 3)
    ]
    fitted = StepTime.fit({u.bucket: u.seconds_per_step for u in bucket_uses(records)})
    assert fitted(4, 48) == pytest.approx(cost(4, 48))


def test_a_bucket_without_tokens_has_no_loss():
    (use,) = bucket_uses([StepRecord(0, Bucket(2, 8), 0.1, 0.0, 0, 0.1)])
    assert np.isnan(use.loss) and use.padding == 1
    assert use.to_dict()["loss"] is None


def test_no_steps_use_no_bucket():
    assert bucket_uses([]) == []
