import numpy as np
import pytest

from jaxbucket import Bucket, BucketPlan
from jaxbucket.schedule import grouping
from jaxbucket.schedule.grouping import examples_by_bucket


@pytest.mark.parametrize("share", [0.05, 0.7, None])
@pytest.mark.parametrize("within", ["source", "ascending", "descending"])
def test_examples_by_bucket_agrees_with_lexsort(problem, within, share, monkeypatch):
    # Small, so that most problems span several chunks.
    monkeypatch.setattr(grouping, "_CHUNK", 37)
    plan, lengths = problem
    rng = np.random.default_rng(0)
    subset = None if share is None else rng.random(len(lengths)) < share
    key = {
        "source": np.zeros(len(lengths)),
        "ascending": lengths.astype(float),
        "descending": -lengths.astype(float),
    }[within]
    bucket = plan.assign(lengths)
    if subset is not None:
        subset[-1] = True
        bucket[~subset] = -1
        # The plan need not hold the other lengths.
        lengths = np.where(subset, lengths, 2**31 - 1)
    expected = np.lexsort((np.arange(len(lengths)), key, bucket))
    expected = expected[bucket[expected] >= 0]
    result, counts = examples_by_bucket(plan, lengths, within, subset)
    assert result.dtype == np.uint32
    np.testing.assert_array_equal(result, expected)
    np.testing.assert_array_equal(
        counts, np.bincount(bucket + 1, minlength=len(plan) + 1)[1:]
    )


def test_sorts_more_than_65536_distinct_lengths():
    lengths = np.random.default_rng(1).permutation(70_000).astype(np.int32) + 1
    plan = BucketPlan((Bucket(1, 40_000), Bucket(1, 70_000)), max_tokens=70_000)
    result, counts = examples_by_bucket(plan, lengths, "descending")
    assert counts.tolist() == [40_000, 30_000]
    np.testing.assert_array_equal(lengths[result[:40_000]], np.arange(40_000, 0, -1))
    np.testing.assert_array_equal(
        lengths[result[40_000:]], np.arange(70_000, 40_000, -1)
    )


def test_a_plan_may_drop_all_examples():
    plan = BucketPlan((Bucket(1, 8),), max_tokens=8, overlong="drop")
    for within in ("source", "ascending"):
        result, counts = examples_by_bucket(plan, np.array([9, 10]), within)
        assert (result.tolist(), counts.tolist()) == ([], [0])
