"""The checks pass our own loader, and find what is wrong with broken ones."""

import re

import numpy as np
import pytest

from jaxbucket import (
    Batch,
    BatchSchedule,
    Bucket,
    RowShard,
    batch_dataset,
    plan_buckets,
    write_token_file,
)
from jaxbucket.testing import check_batches


class Source:
    """Examples of given lengths, which say who they are."""

    def __init__(self, lengths: np.ndarray):
        self._lengths = lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        tokens = index * 31 + np.arange(self._lengths[index], dtype=np.int32)
        return {"tokens": tokens, "index": np.array(index)}


ORDERS = ["shuffled", "source", "ascending", "descending"]


def job(seed=0, count=70, **options):
    lengths = np.random.default_rng(seed).integers(1, 40, count)
    plan = plan_buckets(lengths, max_tokens=960, num_buckets=3, batch_size_multiple=24)
    return plan, lengths, BatchSchedule(plan, lengths, seed=seed, **options)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("remainder", ["cheapest", "promote", "pad"])
@pytest.mark.parametrize("num_hosts", [1, 2, 3, 8])
def test_our_own_batches_keep_every_promise(tmp_path, order, remainder, num_hosts):
    plan, lengths, schedule = job(
        order=order, remainder=remainder, opening="largest_first"
    )
    source = Source(lengths)
    for batches in (
        source,
        write_token_file(
            tmp_path / "file", map(source.__getitem__, range(len(source)))
        ),
    ):

        def loader(host, start_step, batches=batches):
            shard = RowShard((host,), num_hosts)
            return batch_dataset(batches, schedule, shard=shard, start_step=start_step)

        check_batches(
            loader,
            num_examples=len(lengths),
            buckets=plan.buckets,
            max_tokens=plan.max_tokens,
            num_hosts=num_hosts,
        )


def edited(edit):
    """Our loader of two hosts, with its list of batches changed by `edit`."""
    plan, lengths, schedule = job()

    def loader(host, start_step):
        shard = RowShard((host,), 2)
        dataset = batch_dataset(Source(lengths), schedule, shard=shard)
        return edit(list(dataset), host, start_step)

    return loader, {
        "num_examples": len(lengths),
        "buckets": plan.buckets,
        "max_tokens": plan.max_tokens,
        "num_hosts": 2,
    }


def resumed(batches, host, start):
    return batches[start:]


def one_step_less_on_one_host(batches, host, start):
    return batches[start : len(batches) - host]


def another_order_on_one_host(batches, host, start):
    return batches[start:] if host else batches[::-1][start:]


def a_shape_of_its_own(batches, host, start):
    return [Batch(*({n: x[:-1] for n, x in part.items()} for part in batches[0]))]


def the_first_batch_twice(batches, host, start):
    return [batches[0], *batches][start:]


def a_stranger(batches, host, start):
    batches[0].features["index"][0] = 1000
    return batches[start:]


def always_from_the_beginning(batches, host, start):
    return batches


def nothing_after_a_restart(batches, host, start):
    return batches if start == 0 else []


def positions_that_count_on(batches, host, start):
    name = "tokens"
    batches[0].positions[name][:] = np.arange(batches[0].bucket.seq_len)
    return batches[start:]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (one_step_less_on_one_host, r"Lockstep: hosts have \[(\d+), \d+\] steps"),
        (one_step_less_on_one_host, r"Exactly once: examples .* are in no row"),
        (another_order_on_one_host, r"Lockstep: at step 0 hosts have T of \["),
        (a_shape_of_its_own, r"Closed shapes: step 0 has \[.*, which is none of \["),
        (the_first_batch_twice, r"examples .* and \d+ more are in several rows"),
        (a_stranger, "Exactly once: 1000, 1000 are no examples"),
        (always_from_the_beginning, r"Resume: host 0, begun at step 1, has \d+ steps"),
        (always_from_the_beginning, "begun at step 1, has another batch at step 1"),
        (nothing_after_a_restart, "begun at step 1, has 0 steps where"),
        (positions_that_count_on, "at step 0 host 1 has positions of 'tokens' that do"),
    ],
)
def test_what_is_broken_is_named(edit, message):
    loader, job = edited(edit)
    with pytest.raises(AssertionError) as error:
        check_batches(loader, **job)
    assert re.search(message, str(error.value)), error.value


def test_what_is_not_broken_is_not_named():
    loader, job = edited(resumed)
    check_batches(loader, **job)


def test_a_batch_beyond_the_budget_is_named():
    loader, job = edited(resumed)
    most = max(bucket.num_tokens for bucket in job["buckets"])
    with pytest.raises(
        AssertionError, match=rf"Budget: step \d+ has {most} tokens, mo"
    ):
        check_batches(loader, **job | {"max_tokens": most - 1})


def test_another_plan_is_named():
    loader, job = edited(resumed)
    with pytest.raises(AssertionError, match=r"which is none of \[1, 2\], \[3, 4\]\."):
        check_batches(loader, **job | {"buckets": [Bucket(3, 4), Bucket(1, 2)]})
