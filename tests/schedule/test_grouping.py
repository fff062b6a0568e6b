import numpy as np
import pytest

from jaxbucket import Bucket, BucketPlan
from jaxbucket.base import length_counts
from jaxbucket.plan.tally import Tally
from jaxbucket.schedule.epoch_rows import sort_by_bucket


def examples_by_bucket(plan, lengths, within, subset=None):
    used = lengths if subset is None else lengths[subset]
    counts = Tally.of(plan, used).examples
    result = np.empty(counts.sum(), np.uint32)
    sort_by_bucket(result, plan, lengths, counts, within, subset)
    return result, counts


@pytest.mark.parametrize("share", [0.05, 0.7, None])
@pytest.mark.parametrize("within", ["source", "ascending", "descending"])
def test_examples_by_bucket_agrees_with_lexsort(problem, within, share, monkeypatch):
    plan, lengths = problem
    monkeypatch.setattr(length_counts, "_CHUNK", 7)
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
    np.testing.assert_array_equal(result, expected)
    np.testing.assert_array_equal(
        counts, np.bincount(bucket + 1, minlength=len(plan) + 1)[1:]
    )


def test_a_plan_may_drop_all_examples():
    plan = BucketPlan((Bucket(1, 8),), max_tokens=8, overlong="drop")
    for within in ("source", "ascending"):
        result, counts = examples_by_bucket(plan, np.array([9, 10]), within)
        assert (result.tolist(), counts.tolist()) == ([], [0])
