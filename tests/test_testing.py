"""The checks find what is wrong with broken loaders; ours is in test_invariants.py."""

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


def job(seed=0, count=70, **options):
    lengths = np.random.default_rng(seed).integers(1, 40, count)
    plan = plan_buckets(lengths, max_tokens=960, num_buckets=3, batch_size_multiple=24)
    return plan, lengths, BatchSchedule(plan, lengths, seed=seed, **options)


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


def another_dtype_on_one_host(batches, host, start):
    if host:
        tokens = batches[0].features["tokens"]
        batches[0].features["tokens"] = tokens.astype(np.int16)
    return batches[start:]


def a_feature_of_one_host(batches, host, start):
    if host:
        for batch in batches:
            batch.features["more"] = batch.features["index"]
    return batches[start:]


def a_wider_feature(batches, host, start):
    for batch in batches:
        tokens = batch.features["tokens"]
        batch.features["tokens"] = np.pad(tokens, ((0, 0), (0, 3)))
    return batches[start:]


def more_rows_on_one_host(batches, host, start):
    """One row of the first host is the other's."""
    _, lengths, schedule = job()
    first = batch_dataset(Source(lengths), schedule, shard=RowShard((0,), 2))
    for own, its in zip(batches, first, strict=True):
        for into, values in zip(own, its, strict=True):
            for name in into:
                x, y = into[name], values[name]
                into[name] = x[:-1] if host == 0 else np.concatenate([y[-1:], x])
    return batches[start:]


def a_dtype_for_each_bucket(batches, host, start):
    for batch in batches:
        if batch.bucket.seq_len != batches[0].bucket.seq_len:
            batch.features["tokens"] = batch.features["tokens"].astype(np.int64)
    return batches[start:]


def a_scalar_of_too_few_rows(batches, host, start):
    for batch in batches:
        batch.features["label"] = np.zeros(5)
    return batches[start:]


def segments_that_begin_at_two(batches, host, start):
    for batch in batches:
        ids = batch.segment_ids["tokens"]
        ids[ids > 0] = 2
    return batches[start:]


def segments_with_a_hole(batches, host, start):
    ids = batches[0].segment_ids["tokens"]
    row = int(np.argmax(ids.sum(axis=1)))
    ids[row, 1] = 0
    batches[0].positions["tokens"][row, 1] = 0
    return batches[start:]


def no_positions(batches, host, start):
    for batch in batches:
        batch.positions.clear()
    return batches[start:]


def an_identity_of_floats(batches, host, start):
    for batch in batches:
        batch.features["index"] = batch.features["index"] + 0.7
    return batches[start:]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            another_dtype_on_one_host,
            r"at step 0 host 1 has features\['tokens'\] of int16",
        ),
        (
            a_feature_of_one_host,
            r"host 1 has features\['more'\] of .*, at step 0 None",
        ),
        (
            a_wider_feature,
            r"has features\['tokens'\] of \[\d+, \d+\] beside segment ids of \[",
        ),
        (
            more_rows_on_one_host,
            r"Closed shapes: at step \d+ host 1 has .* elsewhere in",
        ),
        (
            a_dtype_for_each_bucket,
            r"host 0 has features\['tokens'\] of int64, at step 0",
        ),
        (
            a_scalar_of_too_few_rows,
            r"host 0 has features\['label'\] of \[5\] in bucket",
        ),
        (
            segments_that_begin_at_two,
            "segment ids of 'tokens' that do not count from 1",
        ),
        (segments_with_a_hole, "at step 0 host 0 has segment ids of 'tokens' that do"),
        (no_positions, "at step 0 host 0 has no positions of 'tokens' beside"),
        (
            an_identity_of_floats,
            "host 0 has no feature 'index' of one integer for each",
        ),
        (one_step_less_on_one_host, r"Lockstep: hosts have \[(\d+), \d+\] steps"),
        (
            one_step_less_on_one_host,
            r"Exactly once: 10 examples \(.* and 5 more\) are in no row",
        ),
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


def test_numbers_of_steps_to_resume_at_may_be_an_iterator():
    def first_host_alone(batches, host, start):
        return batches[start:] if host == 0 else batches

    loader, job = edited(first_host_alone)
    with pytest.raises(AssertionError, match="host 1, begun at step 1, has"):
        check_batches(loader, **job, resume_at=iter([1, 2]))


def test_a_loader_of_no_host_is_refused():
    loader, job = edited(resumed)
    with pytest.raises(ValueError, match="`num_hosts=0` must be a positive integer"):
        check_batches(loader, **job | {"num_hosts": 0})


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


def test_sequences_may_have_lengths_of_their_own():
    """As source and target of a translation."""

    def batch(first):
        index = np.array([first, first + 1])
        x, y = np.ones((2, 4), np.int32), np.array([[1, 1], [1, 0]], np.int32)
        positions = {
            "x": np.tile(np.arange(4), (2, 1)),
            "y": np.array([[0, 1], [0, 0]]),
        }
        return Batch({"x": x, "y": y, "index": index}, {"x": x, "y": y}, positions)

    check_batches(
        lambda host, start: [batch(0), batch(2)][start:],
        num_examples=4,
        # T of both together.
        buckets=[Bucket(2, 6)],
        max_tokens=12,
    )


@pytest.mark.parametrize(
    ("step", "kind"),
    [
        ({"x": np.ones((2, 3))}, "dict"),
        (({"x": np.ones((2, 3))},), "tuple"),
        (np.ones((2, 3)), "ndarray"),
    ],
)
def test_a_loader_of_something_else_is_told_what_to_give(step, kind):
    message = f"`loader` gives a {kind} where a `jaxbucket.Batch` is expected"
    with pytest.raises(ValueError, match=message):
        check_batches(
            lambda host, start: [step],
            **{"num_examples": 2, "buckets": [Bucket(2, 3)], "max_tokens": 6},
        )
