"""Plans for devices of which several may share a row."""

import numpy as np
import pytest

import jaxbucket as jb
from jaxbucket.base.row_shard import RowShard, cuts_of, row_axes

LENGTHS = np.minimum(np.random.default_rng(0).lognormal(6, 1.4, 4000), 16_383)


def power(rows, seq_len):
    """A cost that is not linear in B."""
    return (rows * seq_len) ** 1.2


@pytest.mark.parametrize("num_devices", [8, 24, 64])
@pytest.mark.parametrize("cost_fn", [None, power, jb.plan.TransformerCost(64, 2)])
def test_every_bucket_fits_on_the_devices(num_devices, cost_fn):
    lengths, tokens = LENGTHS.astype(int) + 1, 2048
    limits = jb.plan.device_limits(num_devices, tokens, max_row_shards=8)
    plan = jb.plan_buckets(
        lengths, num_buckets=8, overlong="truncate", cost_fn=cost_fn, **limits
    )
    shard = RowShard(tuple(range(num_devices)), num_devices, cuts=cuts_of(row_axes(8)))
    for bucket in plan.buckets:
        cut = shard.cut(bucket)
        rows = shard.of(bucket).part_size(bucket.batch_size)
        assert rows * bucket.seq_len // cut <= tokens
        # No device more than needed.
        assert cut == 1 or bucket.seq_len > cut // 2 * tokens
    assert {shard.cut(bucket) for bucket in plan.buckets} == {1, 2, 4, 8}
    assert jb.BucketPlan.from_json(plan.to_json()) == plan


def test_one_multiple_is_the_same_as_a_function():
    lengths = LENGTHS.astype(int) + 1
    for cost_fn in (None, power):
        options = {"max_tokens": 65_536, "num_buckets": 6, "cost_fn": cost_fn}
        number = jb.plan_buckets(lengths, batch_size_multiple=4, **options)
        assert number == jb.plan_buckets(
            lengths, batch_size_multiple=lambda _: 4, **options
        )


def test_packed_rows_and_several_lengths():
    limits = jb.plan.device_limits(8, 512, max_row_shards=4)
    lengths = np.random.default_rng(1).integers(1, 1000, 300)
    packed = jb.plan_packing(lengths, **limits)
    shard = RowShard(tuple(range(8)), 8, cuts=(1, 2, 4))
    assert all(map(shard.cut, packed.plan.buckets))
    both = {"source": lengths, "target": lengths[::-1]}
    plan = jb.plan_buckets(both, num_buckets=4, **limits)
    for bucket in plan.buckets:
        rows = shard.of(bucket).part_size(bucket.batch_size)
        assert rows * bucket.tokens_per_row // shard.cut(bucket) <= 512


def test_shares_of_tokens():
    shares = jb.plan.row_shard_shares([10, 20, 30, 200], 16, max_row_shards=4)
    assert [row["devices"] for row in shares] == [1, 2, 4]
    assert [row["examples"] for row in shares] == [0.25, 0.5, 0.25]
    np.testing.assert_allclose(
        [row["tokens"] for row in shares], np.array([10, 50, 200]) / 260
    )
    np.testing.assert_allclose(
        [row["cut_off"] for row in shares],
        np.array([4 + 14 + 184, 168, 136]) / 260,
    )


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: jb.plan.device_limits(8, 16, max_row_shards=3), "max_row_shards"),
        (lambda: jb.plan.device_limits(0, 16), "num_devices"),
        (lambda: jb.plan.device_limits(8, 0), "tokens_per_device"),
        (lambda: jb.plan.row_shard_shares([0], 8), "lengths"),
        (lambda: jb.plan.row_shard_shares([1], 0), "tokens_per_device"),
        (
            lambda: jb.plan_buckets(
                [5, 9], max_tokens=64, batch_size_multiple=lambda seq_len: 0
            ),
            "batch_size_multiple",
        ),
        (
            lambda: jb.plan_buckets(
                [5, 100], **jb.plan.device_limits(4, 16, max_row_shards=4)
            ),
            "max_tokens",
        ),
        (
            lambda: jb.plan.Limits(
                max_tokens=10**6, batch_size_multiple=lambda _: 8, max_batch_size=4
            ).plan([100]),
            "max_batch_size",
        ),
    ],
)
def test_refusals(call, name):
    with pytest.raises(ValueError, match=f"`{name}"):
        call()


@pytest.mark.parametrize("seed", range(30))
def test_any_multiples_of_batch_sizes(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 150, int(rng.integers(1, 200)))
    numbers = rng.integers(1, 9, 4).tolist()

    def multiple(seq_len):
        return numbers[seq_len % 4]

    options = {
        "max_tokens": int(rng.integers(2000, 9000)),
        "batch_size_multiple": multiple,
        "cost_fn": power if seed % 2 else None,
        "accumulate": 1 + seed % 3,
    }
    plan = jb.plan_buckets(lengths, num_buckets=int(rng.integers(1, 7)), **options)
    for bucket in plan.buckets:
        assert bucket.batch_size % multiple(bucket.seq_len) == 0
        assert bucket.num_tokens <= options["max_tokens"]
