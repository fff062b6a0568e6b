import dataclasses
import json

import numpy as np
import pytest

from jaxbucket import BatchSchedule, Bucket, BucketPlan, plan_buckets, report


def check_report(
    plan: BucketPlan, lengths: np.ndarray, remainder: str = "cheapest"
) -> None:
    """Compares every number with one epoch of the schedule."""
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
    is_truncated = plan.overlong == "truncate"
    assert epoch.dropped_examples == (0 if is_truncated else over.sum())
    assert epoch.truncated_examples == (over.sum() if is_truncated else 0)
    assert epoch.truncated_tokens == ((lengths - used).sum() if is_truncated else 0)
    for bucket, reported in zip(plan.buckets, epoch.buckets, strict=True):
        check_bucket(plan, lengths, bucket, reported, batches)


def check_bucket(plan, lengths, bucket, reported, batches) -> None:
    index = plan.buckets.index(bucket)
    in_bucket = [batch for batch in batches if batch.bucket == bucket]
    fit = np.minimum(lengths[plan.assign(lengths) == index], bucket.seq_len)
    rows = np.concatenate([batch.rows for batch in in_bucket] or [np.zeros(0, int)])
    assert (reported.batch_size, reported.seq_len) == (
        bucket.batch_size,
        bucket.seq_len,
    )
    assert reported.batches == len(in_bucket)
    assert reported.examples == len(fit)
    assert reported.empty_rows == np.count_nonzero(rows == -1)
    moved = plan.assign(lengths)[rows[rows >= 0]] < index
    # A moved example is here, unless it moved on to a longer bucket.
    assert reported.carried >= moved.sum()
    wasted = 1 - fit.sum() / (len(fit) * bucket.seq_len) if len(fit) else 0
    assert reported.padding == pytest.approx(wasted)
    total = sum(batch.bucket.num_tokens for batch in batches)
    assert reported.token_share == pytest.approx(
        len(in_bucket) * bucket.num_tokens / total
    )


@pytest.mark.parametrize("remainder", ["cheapest", "promote", "pad"])
def test_a_report_agrees_with_an_epoch_of_the_schedule(problem, remainder):
    check_report(*problem, remainder)


def test_a_report_counts_left_over_examples():
    plan = BucketPlan((Bucket(4, 8), Bucket(2, 16)), max_tokens=32)
    epoch = report(plan, [6] * 11 + [16] * 5, remainder="drop")
    assert (epoch.left_over_examples, epoch.examples) == (4, 12)
    assert [bucket.left_over for bucket in epoch.buckets] == [3, 1]
    assert (epoch.real_tokens, epoch.padded_tokens) == (6 * 8 + 16 * 4, 4 * 32)
    assert "4 examples do not fill a batch and are left out." in epoch.summary


def test_a_report_agrees_with_the_schedule_on_real_lengths(real_lengths):
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


def test_the_json_has_every_number():
    plan = BucketPlan((Bucket(6, 10), Bucket(2, 30)), max_tokens=60)
    epoch = report(plan, [10, 20, 30])
    fields = json.loads(epoch.to_json())
    assert fields == json.loads(json.dumps(epoch.to_dict()))
    assert fields["steps_per_epoch"] == 2
    assert fields["buckets"][1]["seq_len"] == 30


def test_a_report_is_printed_as_a_table():
    plan = BucketPlan((Bucket(6, 10), Bucket(2, 30)), max_tokens=60)
    epoch = dataclasses.replace(report(plan, [10, 20, 30]), unit="bytes")
    text = str(epoch)
    assert epoch.summary in text
    assert max(map(len, text.splitlines())) <= 80
    explained = ("B rows", "Examples:", "Moved in:", "Empty rows:", "Padding:")
    assert all(name in text for name in (*explained, "Share of bytes:"))
    assert "Share of time:" not in text


def test_the_summary_counts_dropped_and_truncated_examples():
    for overlong, words in (
        ("drop", "2 examples are too long and are dropped."),
        (
            "truncate",
            "2 examples are too long and are truncated; 14 tokens are lost in total.",
        ),
    ):
        plan = BucketPlan((Bucket(1, 8),), max_tokens=8, overlong=overlong)
        assert words in report(plan, [8, 10, 20]).summary
    plan = BucketPlan((Bucket(1, 20),), max_tokens=20)
    assert "too long" not in report(plan, [8, 10, 20]).summary


@pytest.mark.parametrize(
    ("order", "remainder"), [("shuffled", "cheapest"), ("ascending", "drop")]
)
def test_the_padding_of_sequences_agrees_with_the_schedule(remainder, order):
    rng = np.random.default_rng(0)
    pairs = {name: rng.integers(1, 100, 300) for name in ("source", "target")}
    plan = plan_buckets(pairs, max_tokens=2000, num_buckets=5)
    options = {"remainder": remainder, "order": order}
    schedule = BatchSchedule(plan, pairs, seed=3, **options)
    epoch = schedule.report()
    batches = list(schedule)
    rows = np.concatenate([batch.rows for batch in batches])
    assert sum(epoch.sequence_tokens.values()) == pytest.approx(epoch.real_tokens, 1e-3)
    for name, lengths in pairs.items():
        real = lengths[rows[rows >= 0]].sum()
        padded = sum(x.bucket.batch_size * x.bucket.seq_len[name] for x in batches)
        tolerance = 0.02 if remainder == "drop" and order == "shuffled" else 1e-9
        padding = epoch.sequence_padding[name]
        assert padding == pytest.approx(1 - real / padded, abs=tolerance)


@pytest.mark.parametrize("overlong", ["error", "truncate", "split"])
@pytest.mark.parametrize("longest", [2**31 - 1, 2**31 - 3])
def test_real_tokens_beyond_the_integers_of_float64_are_exact(overlong, longest):
    lengths = np.full(7_000_001, longest, np.int32)
    lengths[::9] = 1
    size = longest if overlong == "error" else longest - 2
    plan = BucketPlan.from_shapes([(1, 7), (1, size)], overlong=overlong)
    expected = int(lengths.sum(dtype=np.int64))
    if overlong == "truncate":
        expected = int(np.minimum(lengths, size).sum(dtype=np.int64))
    assert report(plan, lengths).real_tokens == expected


@pytest.mark.parametrize(
    ("max_tokens", "multiple", "words"),
    [
        (65_536, 8, ["72 of the 65,536 positions", "62.5% of the positions are empty"]),
        (72, 8, ["62.5% of the positions are empty rows"]),
        (120, 1, ["27 of the 120 positions"]),
        (27, 1, []),
    ],
)
def test_wasteful_limits_are_named(max_tokens, multiple, words):
    lengths = [3, 5, 9]
    plan = plan_buckets(
        lengths, max_tokens=max_tokens, num_buckets=1, batch_size_multiple=multiple
    )
    epoch = report(plan, lengths)
    assert len(epoch.wasteful_limits) == len(words)
    for part, sentence in zip(words, epoch.wasteful_limits, strict=True):
        assert part in sentence and sentence in epoch.summary
    assert epoch.to_dict()["wasteful_limits"] == epoch.wasteful_limits
