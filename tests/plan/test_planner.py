import numpy as np
import pytest

from jaxbucket import Bucket, BucketPlan, plan_buckets, report


def uniform(size: int = 1000, longest: int = 500) -> np.ndarray:
    return np.random.default_rng(0).integers(1, longest + 1, size)


def check_plan(plan, lengths, max_tokens: int, multiples: tuple[int, int]) -> None:
    """Checks the budget, the multiples, and that B is the smallest for its steps."""
    rows, most = multiples[0], max_tokens // plan.boundaries
    for bucket, largest in zip(
        report(plan, lengths).buckets, most // rows * rows, strict=True
    ):
        assert bucket.batch_size <= largest
        assert bucket.batch_size % rows == bucket.seq_len % multiples[1] == 0
        # No B is larger than its rows fill, or needs more batches than the largest.
        assert bucket.empty_rows < max(bucket.batches, 1) * rows or not bucket.batches
        used = bucket.batches * bucket.batch_size - bucket.empty_rows
        assert bucket.batches == -(-used // largest)


@pytest.mark.parametrize("boundaries", ["optimal", "quantile", "geometric"])
@pytest.mark.parametrize("multiples", [(1, 1), (8, 128), (3, 7)])
def test_every_bucket_respects_the_budget(boundaries, multiples):
    for seed in range(20):
        rng = np.random.default_rng(seed)
        lengths = rng.integers(1, rng.integers(2, 3000), rng.integers(1, 500))
        max_tokens = int(multiples[0] * (lengths.max() + 127) * rng.integers(1, 20))
        plan = plan_buckets(
            lengths,
            max_tokens=max_tokens,
            num_buckets=int(rng.integers(1, 12)),
            batch_size_multiple=multiples[0],
            seq_len_multiple=multiples[1],
            boundaries=boundaries,
        )
        check_plan(plan, lengths, max_tokens, multiples)
        assert plan.max_seq_len - multiples[1] < lengths.max() <= plan.max_seq_len


SMALL_SETS = {
    "3 documents": ([5, 3, 9], 65_536, 8, [(8, 9)]),
    "20 documents": (uniform(20, 450) + 49, 65_536, 8, [(24, 499)]),
    "one long": ([700] + [7] * 11, 8192, 8, [(16, 7), (8, 700)]),
    "one outlier": ([10_000] + [100] * 1000, 2**20, 8, [(1000, 100), (8, 10_000)]),
    "one example": ([17], 2**40, 1, [(1, 17)]),
    "a multiple above the examples": ([5, 9], 2**20, 64, [(64, 9)]),
    "13 of two lengths": ([4] * 7 + [9] * 6, 36, 1, [(7, 4), (3, 9)]),
}


@pytest.mark.parametrize("case", SMALL_SETS.values(), ids=SMALL_SETS)
def test_small_sets_cost_no_more_than_by_hand(case):
    lengths, max_tokens, multiple, shapes = case
    plan = plan_buckets(
        lengths, max_tokens=max_tokens, num_buckets=6, batch_size_multiple=multiple
    )
    ours = report(plan, lengths).padded_tokens
    assert ours <= report(BucketPlan.from_shapes(shapes), lengths).padded_tokens
    check_plan(plan, lengths, max_tokens, (multiple, 1))


@pytest.mark.parametrize("allowed", [lambda b: b % 8 == 0, lambda b: not b & (b - 1)])
def test_a_cost_may_exclude_batch_sizes(allowed):
    for lengths in ([100] * 990, [100] * 1001, uniform(3000, 300)):
        plan = plan_buckets(
            lengths,
            max_tokens=lambda t: 512 * t,
            num_buckets=3,
            cost_fn=lambda b, t: float(b * t) if allowed(b) else 1e12,
        )
        assert all(map(allowed, plan.batch_sizes.tolist()))


def test_a_plan_of_a_sample_has_the_largest_batches():
    lengths = {"a": uniform(30), "b": uniform(30)[::-1]}
    several = plan_buckets(lengths, max_tokens=8192, num_buckets=3, sample=True)
    assert (several.batch_sizes == 8192 // several.tokens_per_row).all()
    plan = plan_buckets(lengths["a"], max_tokens=8192, num_buckets=3, sample=True)
    assert (plan.batch_sizes == 8192 // plan.boundaries).all()


def test_the_last_bucket_has_max_seq_len():
    plan = plan_buckets(uniform(), max_tokens=8192, max_seq_len=1024)
    # No example needs it.
    assert plan.buckets[-1] == Bucket(1, 1024)


def test_distant_lengths_need_no_table_of_all_lengths():
    lengths = np.append(uniform(), 2**30)
    plan = plan_buckets(lengths, max_tokens=2**31, num_buckets=3, seq_len_multiple=8)
    assert plan.max_seq_len == 2**30
    assert plan.buckets[-2].seq_len <= 504
    assert report(plan, lengths).examples == 1001


# Given boundaries


def test_given_boundaries_are_used_unchanged():
    plan = plan_buckets(uniform(), max_tokens=4096, boundaries=[64, 128, 512])
    assert plan.boundaries.tolist() == [64, 128, 512]
    # The largest B are 64, 32 and 8, for 117, 129 and 754 examples.
    assert plan.batch_sizes.tolist() == [60, 26, 8]
    array = plan_buckets(uniform(), max_tokens=4096, boundaries=np.array([64, 512]))
    assert array.boundaries.tolist() == [64, 512]


# Invalid arguments


def test_the_remedy_for_a_small_budget_is_sufficient():
    options = {"batch_size_multiple": 8, "seq_len_multiple": 64}
    with pytest.raises(ValueError, match="`max_tokens=1024`.*to 4096"):
        plan_buckets([500], max_tokens=1024, **options)
    plan = plan_buckets([500], max_tokens=4096, **options)
    assert plan.buckets == (Bucket(8, 512),)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("max_tokens", {"max_tokens": x}) for x in (0, -1, 2.0, True, "8", None)),
        ("max_tokens", {"max_tokens": 2**63}),
        ("num_buckets", {"num_buckets": 0}),
        ("batch_size_multiple", {"batch_size_multiple": 2.0}),
        ("seq_len_multiple", {"seq_len_multiple": True}),
        ("max_seq_len", {"max_seq_len": "8"}),
        ("max_seq_len", {"max_seq_len": 500, "seq_len_multiple": 64}),
        ("max_seq_len", {"max_seq_len": 4, "overlong": "drop"}),
        ("max_seq_len", {"max_seq_len": 8, "boundaries": [8, 64]}),
        ("max_seq_len", {"max_seq_len": 128, "boundaries": [8, 64]}),
        ("lengths", {"max_seq_len": 4}),
        ("overlong", {"overlong": "cut"}),
        ("boundaries", {"boundaries": 8}),
        ("boundaries", {"boundaries": "best"}),
        ("boundaries", {"boundaries": []}),
        ("lengths", {"boundaries": [4]}),
        ("boundaries", {"boundaries": [512, 64]}),
        ("boundaries", {"boundaries": [64.0, 512.0]}),
        ("boundaries", {"boundaries": [100, 512], "seq_len_multiple": 8}),
        ("boundaries", {"boundaries": lambda candidates, number: [1]}),
    ],
)
def test_invalid_options_are_refused(name, options):
    with pytest.raises(ValueError, match=f"`{name}"):
        plan_buckets([5, 9], **{"max_tokens": 4096, **options})
