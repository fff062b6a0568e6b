"""Plans for examples that are split into chunks."""

import dataclasses

import numpy as np
import pytest

import jaxbucket as jb
from jaxbucket.plan import chunk_lengths


def random_lengths(seed: int) -> np.ndarray:
    """Short lengths, multiples of 8, and much longer ones."""
    rng = np.random.default_rng(seed)
    some = rng.integers(1, 40, 60), rng.integers(1, 6, 60) * 8
    return np.where(rng.random(60) < 0.7, *some)


@pytest.mark.parametrize("longest", [1, 8, 40, 2**40])
def test_all_chunks_but_the_last_of_an_example_are_full(longest):
    lengths = random_lengths(longest)
    expected = [
        min(longest, int(n) - start) for n in lengths for start in range(0, n, longest)
    ]
    chunks = chunk_lengths(lengths, longest)
    assert chunks.dtype == np.int32 and chunks.tolist() == expected
    assert chunk_lengths([2**31 - 1, 1], 2**30).tolist() == [2**30, 2**30 - 1, 1]


@pytest.mark.parametrize("seed", range(6))
def test_a_plan_and_its_report_are_those_of_the_chunks(seed):
    lengths = random_lengths(seed)
    options = {
        "max_tokens": 480,
        "num_buckets": 3,
        "max_seq_len": [4, 8, 20][seed % 3],
        "boundaries": ["optimal", "quantile"][seed % 2],
    }
    plan = jb.plan_buckets(lengths, overlong="split", **options)
    chunks = chunk_lengths(lengths, plan.max_seq_len)
    of_chunks = jb.plan_buckets(chunks, **options)
    assert plan == dataclasses.replace(of_chunks, overlong="split")
    assert jb.BucketPlan.from_json(plan.to_json()) == plan
    assert plan.fingerprint != of_chunks.fingerprint
    epoch, over = jb.report(plan, lengths), lengths > plan.max_seq_len
    assert epoch.split_examples == over.sum()
    assert epoch.chunks == sum(-(-n // plan.max_seq_len) for n in lengths[over])
    assert epoch.real_tokens == lengths.sum() and epoch.examples == len(chunks)
    without = dataclasses.replace(epoch, split_examples=0, chunks=0)
    assert jb.report(plan, chunks) == without
    assert epoch.steps_per_epoch == len(jb.BatchSchedule(plan, chunks))


@pytest.mark.parametrize(("lengths", "longest"), [([3], 0), ([3], 2.0), ([3, 0], 2)])
def test_invalid_lengths_and_sizes_are_refused(lengths, longest):
    with pytest.raises(ValueError, match=r"`max_seq_len|`lengths\["):
        chunk_lengths(lengths, longest)


def test_chunks_that_do_not_fit_into_memory_are_counted():
    # Their lengths alone would take 78 TiB.
    lengths = np.full(10_000, 2**31 - 1, np.int32)
    plan = jb.plan_buckets(lengths, max_tokens=64, max_seq_len=1, overlong="split")
    assert jb.report(plan, lengths).chunks == 10_000 * (2**31 - 1)
