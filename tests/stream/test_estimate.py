"""The estimated steps of a stream, against streams that are read to their end."""

import numpy as np
import pytest
from stream_cases import stream

import jaxbucket as jb


def batches_of(lengths, known, **options):
    plan = jb.plan_buckets(
        known, max_tokens=1024, num_buckets=6, sample=True, max_seq_len=256
    )
    return jb.stream_batches(
        stream(lengths), plan, pool_size=512, lengths=known, **options
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_segments_per_row": 8},
        {"accumulate": 2},
        {"accumulate": 4, "group": "mixed"},
    ],
    ids=str,
)
def test_the_number_of_steps_is_within_the_error(options):
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(3.5, 0.8, 2000).astype(int) + 1, 256)
    within = []
    for size in (500, 1000, 2000):
        batches = batches_of(lengths, rng.permutation(lengths)[:size], **options)
        steps, error = batches.steps_per_epoch(len(lengths))
        number = sum(1 for _ in batches)
        within.append(abs(number - steps) <= error)
        # With all lengths, only the ends of the buckets are not certain.
        assert error < (0.2 * number if size < 2000 else 4)
    # 95% of them are.
    assert sum(within) >= 2 and (within[-1] or "max_segments_per_row" in options)


def test_the_error_falls_with_the_known_lengths():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 256, 4000)
    errors = [
        batches_of(lengths[:100], lengths[:size]).steps_per_epoch(10**6).error
        for size in (40, 400, 4000)
    ]
    assert errors[0] > 2 * errors[1] > 4 * errors[2] > 0


@pytest.mark.parametrize("overlong", ["split", "drop", "truncate"])
def test_overlong_examples_are_counted_as_the_stream_does(overlong):
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(4, 1, 1500).astype(int) + 1, 900)
    options = {"max_seq_len": 64, "overlong": overlong, "sample": True}
    plan = jb.plan_buckets(lengths, max_tokens=640, num_buckets=3, **options)
    batches = jb.stream_batches(stream(lengths), plan, pool_size=300, lengths=lengths)
    steps, error = batches.steps_per_epoch(len(lengths))
    assert abs(sum(1 for _ in batches) - steps) <= error < 3


@pytest.mark.parametrize(
    ("argument", "number"),
    [("num_examples", 0), ("num_examples", 255), ("lengths", 1000)],
)
def test_unknown_lengths_and_numbers_are_named(argument, number):
    lengths = np.arange(1, 257)
    batches = batches_of(lengths, lengths)
    if argument == "lengths":
        batches = jb.stream_batches(stream(lengths), batches.plan, pool_size=512)
    with pytest.raises(ValueError, match=f"`{argument}"):
        batches.steps_per_epoch(number)
