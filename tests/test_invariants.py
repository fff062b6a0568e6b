"""The invariants hold for all orders, remainders, groups, hosts and workers."""

import itertools
import json
import pathlib

import grain
import numpy as np
import pytest

from jaxbucket import (
    Batch,
    BatchSchedule,
    Curriculum,
    JoinedSchedule,
    Mixture,
    batch_dataset,
    plan_buckets,
)
from jaxbucket.base.digest import digest
from jaxbucket.data import RowShard, load_in_workers, write_token_file
from jaxbucket.schedule import (
    GroupedByLength,
    LinearPacing,
)
from jaxbucket.schedule.base import Schedule
from jaxbucket.testing import check_batches

ORDERS = (
    *("shuffled", "spread", "source", "ascending", "descending"),
    *("curriculum", "mixture", "joined", GroupedByLength(2)),
)
REMAINDERS = ("cheapest", "promote", "pad", "drop", "repeat")
GROUPS = ((1, "same"), (2, "same"), (3, "mixed"))
# All pairs of options.
CASES = [
    (ORDERS[i], REMAINDERS[j], GROUPS[k])
    for i, j, k in itertools.product(range(len(ORDERS)), range(5), range(3))
    if (i + j + k) % 3 == 0
]
HOSTS = (1, 2, 3, 8)
# Mostly long, so that each half fills a batch of twice the size.
LENGTHS = np.ceil(39 * np.random.default_rng(0).random(160) ** 0.3).astype(int)
HALVES = np.split(LENGTHS, 2)
# The batch sizes are divisible by 1, 2, 3 and 8 hosts.
PLAN = plan_buckets(
    LENGTHS, max_tokens=960, boundaries=[14, 27, 39], batch_size_multiple=24
)
SOURCE = [
    {"tokens": i * 31 + np.arange(n, dtype=np.int32), "index": np.array(i)}
    for i, n in enumerate(LENGTHS)
]
TESTS = pathlib.Path(__file__).parent


def falls(epochs: float) -> float:
    """A pacing function that starts again every half epoch."""
    return LinearPacing(0.2, 0.4)(epochs % 0.5)


def schedule_of(order, remainder, group) -> tuple[Schedule, int]:
    """Returns the schedule, and the number of examples that an epoch leaves out."""
    options = {
        "remainder": remainder,
        "accumulate": group[0],
        "group": group[1],
        "seed": 5,
    }
    if order == "mixture":
        parts = [BatchSchedule(PLAN, half, **options) for half in HALVES]
        # Proportional to the epochs, so that they end together.
        weights = [len(part) for part in parts]
        left_out = sum(int(part.flow.dropped.sum()) for part in parts)
        return Mixture(parts, weights), left_out
    if order == "joined":
        first = BatchSchedule(PLAN, LENGTHS, order="ascending", **options)
        second = BatchSchedule(PLAN, LENGTHS, **options)
        left_out = int(first.flow.dropped.sum())
        return JoinedSchedule({0: first, len(first): second}), left_out
    if order == "curriculum":
        # The difficulty rises and falls within an epoch.
        order = Curriculum(LENGTHS % 7, falls)
    elif order != "descending" and remainder != "drop":
        options["largest_first"] = True
    schedule = BatchSchedule(PLAN, LENGTHS, order=order, **options)
    return schedule, int(schedule.flow.dropped.sum())


def ids(case) -> str:
    order, remainder, (accumulate, group) = case
    return f"{order}-{remainder}-{accumulate} {group}"


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_every_invariant_holds(case):
    schedule, left_out = schedule_of(*case)
    repeated = 0
    if case[1] == "repeat":
        steps = range(schedule.epoch_start(1))
        batches = [batch for step in steps for batch in schedule.micro_batches(step)]
        assert all((batch.rows >= 0).all() for batch in batches)
        repeated = sum(batch.bucket.batch_size for batch in batches) - len(LENGTHS)
        if isinstance(schedule, BatchSchedule):
            assert schedule.report().repeated_rows == repeated
    for num_hosts in HOSTS:

        def loader(host, start_step, num_hosts=num_hosts):
            shard = RowShard((host,), num_hosts)
            return batch_dataset(SOURCE, schedule, shard=shard, start_step=start_step)

        check_batches(
            loader,
            num_examples=len(LENGTHS),
            buckets=PLAN.buckets,
            max_tokens=PLAN.max_tokens,
            num_hosts=num_hosts,
            num_dropped=left_out,
            num_repeated=repeated,
            # With one host, resume at every step.
            resume_at=None if num_hosts == 1 else (1, len(schedule) - 1),
        )


def leaves(step: Batch | tuple[Batch, ...]) -> bytes:
    micro = (step,) if isinstance(step, Batch) else step
    return b"".join(
        f"{name} {x.dtype} {x.shape}".encode() + x.tobytes()
        for batch in micro
        for part in batch
        for name, x in sorted(part.items())
    )


def three_epochs(case):
    """Returns the dataset of a case, for this process or for workers."""
    schedule, _ = schedule_of(*case)
    return batch_dataset(SOURCE, schedule, num_epochs=3)


def loaded_digests(workers: int, threads: int) -> dict[str, str]:
    """Returns a digest of the batches of each case, all loaded one after another."""
    all_cases = grain.MapDataset.concatenate([*map(three_epochs, CASES)])
    steps = iter(load_in_workers(all_cases, workers, num_threads=threads))
    return {
        ids(case): digest(
            *map(leaves, itertools.islice(steps, len(three_epochs(case))))
        )
        for case in CASES
    }


@pytest.fixture(scope="module")
def expected_digests() -> dict[str, str]:
    return {ids(case): digest(*map(leaves, three_epochs(case))) for case in CASES}


def test_threads_do_not_change_the_batches(expected_digests):
    assert loaded_digests(0, 8) == expected_digests


SCRIPT = f"""
import json, sys
sys.path.insert(0, {str(TESTS)!r})
import test_invariants

if __name__ == "__main__":
    print(json.dumps(test_invariants.loaded_digests(2, 4)))
"""


@pytest.mark.exhaustive
def test_workers_and_threads_do_not_change_the_batches(
    tmp_path, expected_digests, python
):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert json.loads(python(script).stdout) == expected_digests


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_a_run_resumes_at_every_step_of_three_epochs(case):
    whole = [leaves(step) for step in three_epochs(case)]
    for start in range(len(whole)):
        # A new dataset, as after a restart, which only knows the position.
        dataset = three_epochs(case)
        rest = dataset.resume(dataset.position(start))
        assert len(rest) == len(whole) - start
        for step in {0, 1, len(rest) // 2, len(rest) - 1} & set(range(len(rest))):
            assert leaves(rest[step]) == whole[start + step]


def rows_of(batches: list[Batch | tuple[Batch, ...]]) -> list[list[int]]:
    """Returns the examples of one step in row order, given all hosts' batches."""
    micro = [(x,) if isinstance(x, Batch) else x for x in batches]
    return [
        np.concatenate(
            [np.where(b.mask.any(axis=1), b.features["index"], -1) for b in parts]
        ).tolist()
        for parts in zip(*micro, strict=True)
    ]


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_a_run_resumes_with_a_different_number_of_hosts(case):
    schedule, _ = schedule_of(*case)
    num_steps = 2 * len(schedule)
    expected = [
        [batch.rows.tolist() for batch in schedule.micro_batches(step)]
        for step in range(num_steps)
    ]
    result = []
    third = num_steps // 3
    for num_hosts, start, end in (
        (4, 0, third),
        (2, third, 2 * third),
        (8, 2 * third, num_steps),
    ):
        hosts = [
            batch_dataset(
                *(SOURCE, schedule),
                shard=RowShard((host,), num_hosts),
                start_step=start,
                num_steps=end,
            )
            for host in range(num_hosts)
        ]
        result += [rows_of(list(step)) for step in zip(*hosts, strict=True)]
    assert result == expected


def test_sampling_with_replacement_violates_only_one_invariant():
    order = Curriculum(LENGTHS, replacement=True)
    schedule = BatchSchedule(PLAN, LENGTHS, order=order, accumulate=2, group="mixed")

    def loader(host, start_step):
        shard = RowShard((host,), 3)
        return batch_dataset(SOURCE, schedule, shard=shard, start_step=start_step)

    with pytest.raises(AssertionError) as error:
        check_batches(
            loader,
            num_examples=len(LENGTHS),
            buckets=PLAN.buckets,
            max_tokens=PLAN.max_tokens,
            num_hosts=3,
        )
    for line in str(error.value).splitlines():
        assert line.startswith("Exactly once: ")


@pytest.mark.parametrize("group", GROUPS)
def test_a_token_file_has_the_same_batches(tmp_path, group):
    schedule, _ = schedule_of("shuffled", "cheapest", group)
    file = write_token_file(tmp_path / "file", SOURCE)
    for a, b in zip(
        batch_dataset(file, schedule), batch_dataset(SOURCE, schedule), strict=True
    ):
        assert leaves(a) == leaves(b)
