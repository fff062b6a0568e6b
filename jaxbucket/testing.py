"""The invariants as checks that can be pointed at any loader.

A loader is whatever gives `Batch`es of numpy arrays for one host from a step on. Each
example says who it is in a feature of its own, one integer for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from jaxbucket.base import Batch, Bucket

Loader: TypeAlias = Callable[[int, int], Iterable[Batch]]

_MAX_NAMED = 5


def check_batches(
    loader: Loader,
    *,
    num_examples: int,
    buckets: Collection[Bucket],
    max_tokens: int,
    num_hosts: int = 1,
    identity: str = "index",
    resume_at: Iterable[int] | None = None,
) -> None:
    """Checks an epoch of a loader, over all its hosts.

    Example:
      >>> import jaxbucket as jb
      >>> source = [{"x": [0] * n, "index": i} for i, n in enumerate((3, 1, 4, 2))]
      >>> plan = jb.plan_buckets([3, 1, 4, 2], max_tokens=8)
      >>> schedule = jb.BatchSchedule(plan, [3, 1, 4, 2])
      >>> def loader(host, start_step):
      ...     return jb.batch_dataset(source, schedule, start_step=start_step)
      >>> check_batches(loader, num_examples=4, buckets=plan.buckets, max_tokens=8)

    Args:
      loader: `(host, start_step) -> batches` of the epoch from this step on, those
        rows of each that the host has.
      num_examples: how many there are, named from 0 on.
      buckets: the shapes (B, T) that global batches may have.
      max_tokens: what B * T may be.
      num_hosts: how many there are; no two have the same rows.
      identity: the feature `[B]` that names the example in a row.
      resume_at: steps to begin at anew, by default all.

    Raises:
      AssertionError: for every promise that is broken: closed shapes, the budget, the
        same bucket and number of steps on all hosts, every example in one row, and
        the same batches where it is resumed.
    """
    hosts = [[_copy(batch) for batch in loader(host, 0)] for host in range(num_hosts)]
    broken = [
        *_lockstep(hosts),
        *_shapes(hosts, set(buckets), max_tokens),
        *_segments(hosts),
        *_exactly_once(hosts, num_examples, identity),
    ]
    steps = range(len(hosts[0])) if resume_at is None else resume_at
    for host, batches in enumerate(hosts):
        for step in steps:
            broken += _resumed(loader(host, step), batches[step:], host, step)
    if broken:
        raise AssertionError("\n".join(broken))


def _copy(batch: Batch) -> Batch:
    """A loader may use its arrays again."""
    return Batch(*({name: np.array(x) for name, x in part.items()} for part in batch))


def _lockstep(hosts: list[list[Batch]]) -> Iterator[str]:
    steps = [len(batches) for batches in hosts]
    if len(set(steps)) > 1:
        yield f"Lockstep: hosts have {steps} steps."
    for step, batches in enumerate(zip(*hosts, strict=False)):
        lengths = [batch.bucket.seq_len for batch in batches]
        if len(set(lengths)) > 1:
            yield f"Lockstep: at step {step} hosts have T of {lengths}."


def _shapes(
    hosts: list[list[Batch]], buckets: set[Bucket], max_tokens: int
) -> Iterator[str]:
    for step, batches in enumerate(zip(*hosts, strict=False)):
        num_rows = sum(batch.bucket.batch_size for batch in batches)
        found = Bucket(num_rows, batches[0].bucket.seq_len)
        if found not in buckets:
            known = ", ".join(map(str, sorted(buckets)))
            yield f"Closed shapes: step {step} has {found}, which is none of {known}."
        if found.num_tokens > max_tokens:
            yield (
                f"Budget: step {step} has {found.num_tokens} tokens, more than "
                f"`max_tokens={max_tokens}`."
            )


def _segments(hosts: list[list[Batch]]) -> Iterator[str]:
    """Positions count from 0 where a segment begins, and are 0 in padding."""
    for host, batches in enumerate(hosts):
        for step, batch in enumerate(batches):
            for name, ids in batch.segment_ids.items():
                begins = np.diff(ids, axis=1, prepend=0) != 0
                places = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
                starts = np.maximum.accumulate(np.where(begins, places, 0), axis=1)
                expected = np.where(ids > 0, places - starts, 0)
                if not np.array_equal(batch.positions[name], expected):
                    yield (
                        f"Segments: at step {step} host {host} has positions of "
                        f"{name!r} that do not follow from its segment ids."
                    )


def _exactly_once(
    hosts: list[list[Batch]], num_examples: int, identity: str
) -> Iterator[str]:
    parts = [_examples(batch, identity) for batches in hosts for batch in batches]
    found = np.concatenate([np.empty(0, np.int64), *parts])
    inside = (found >= 0) & (found < num_examples)
    if not inside.all():
        yield f"Exactly once: {_some(found[~inside])} are no examples."
    counts = np.bincount(found[inside], minlength=num_examples)
    for words, wrong in (("in no row", counts == 0), ("in several rows", counts > 1)):
        if wrong.any():
            yield f"Exactly once: examples {_some(np.flatnonzero(wrong))} are {words}."


def _examples(batch: Batch, identity: str) -> np.ndarray:
    ids = next(iter(batch.segment_ids.values()))
    return np.asarray(batch.features[identity])[ids.max(axis=1) > 0].astype(np.int64)


def _some(numbers: Sequence[int] | np.ndarray) -> str:
    named = ", ".join(str(int(number)) for number in numbers[:_MAX_NAMED])
    more = len(numbers) - _MAX_NAMED
    return f"{named} and {more} more" if more > 0 else named


def _resumed(
    again: Iterable[Batch], expected: list[Batch], host: int, start: int
) -> Iterator[str]:
    where = f"Resume: host {host}, begun at step {start},"
    found = [_copy(batch) for batch in again]
    if len(found) != len(expected):
        yield f"{where} has {len(found)} steps where {len(expected)} are left."
    for step, (a, b) in enumerate(zip(found, expected, strict=False), start):
        if not _same(a, b):
            yield f"{where} has another batch at step {step}."
            return


def _same(a: Batch, b: Batch) -> bool:
    return all(
        x.keys() == y.keys()
        and all(
            x[name].dtype == y[name].dtype
            and x[name].shape == y[name].shape
            and x[name].tobytes() == y[name].tobytes()
            for name in x
        )
        for x, y in zip(a, b, strict=True)
    )
