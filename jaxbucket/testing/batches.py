"""The invariants as checks that can be pointed at any loader.

A loader is whatever gives `Batch`es of numpy arrays for one host from a step on, or
tuples of them where a step has several. Each example says who it is in a feature of its
own, one integer for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from jaxbucket.base.batch import Batch
from jaxbucket.base.buckets import Bucket
from jaxbucket.base.checks import check_positive

Step: TypeAlias = tuple[Batch, ...]
Loader: TypeAlias = Callable[[int, int], Iterable[Batch | Step]]

_MAX_NAMED = 5


def check_batches(
    loader: Loader,
    *,
    num_examples: int,
    buckets: Collection[Bucket],
    max_tokens: int,
    num_hosts: int = 1,
    identity: str = "index",
    left_out: int = 0,
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
      identity: the feature `[B]` that names the example in a row; of packed rows
        `[B, max_segments]`, those in it.
      left_out: how many examples an epoch leaves out on purpose.
      resume_at: steps to begin at anew, by default all.

    Raises:
      AssertionError: for every promise that is broken: closed shapes (of every array,
        with its dtype), the budget, the same shapes and number of steps on all hosts,
        every example in one row, and the same batches where it is resumed.
      ValueError: if `num_hosts` is not positive, or the loader gives something else
        than batches.
    """
    check_positive("num_hosts", num_hosts)
    hosts = [list(map(_copied, loader(host, 0))) for host in range(num_hosts)]
    broken = [
        *_lockstep(hosts),
        *_shapes(hosts, set(buckets), max_tokens),
        *_arrays(hosts),
        *_segments(hosts),
        *_exactly_once(hosts, num_examples, identity, left_out),
    ]
    steps = list(range(len(hosts[0])) if resume_at is None else resume_at)
    for host, local_steps in enumerate(hosts):
        for step in steps:
            broken += _resumed(loader(host, step), local_steps[step:], host, step)
    if broken:
        raise AssertionError("\n".join(broken))


def _copied(step: Batch | Step) -> Step:
    """The micro-batches of a step; copied, as a loader may use its arrays again."""
    micro_batches = (step,) if isinstance(step, Batch) else step
    is_tuple = isinstance(micro_batches, tuple)
    if not is_tuple or not all(isinstance(x, Batch) for x in micro_batches):
        raise ValueError(
            f"`loader` gives a {type(step).__name__} where a `jaxbucket.Batch` is "
            "expected, or a tuple of them. `collate_rows` makes one of examples, and "
            "`Batch({'x': x}, {'x': segment_ids}, {'x': positions})` one of arrays, "
            "with segment ids 1 for tokens and 0 for padding."
        )
    return tuple(
        Batch(*({name: np.array(x) for name, x in part.items()} for part in batch))
        for batch in micro_batches
    )


def _lockstep(hosts: list[list[Step]]) -> Iterator[str]:
    num_steps = list(map(len, hosts))
    if len(set(num_steps)) > 1:
        yield f"Lockstep: hosts have {num_steps} steps."
    for step, at_hosts in enumerate(zip(*hosts, strict=False)):
        seq_lens = [[batch.bucket.seq_len for batch in at_host] for at_host in at_hosts]
        if any(at_host != seq_lens[0] for at_host in seq_lens):
            shown = [x[0] if len(x) == 1 else x for x in seq_lens]
            yield f"Lockstep: at step {step} hosts have T of {shown}."


def _shapes(
    hosts: list[list[Step]], buckets: set[Bucket], max_tokens: int
) -> Iterator[str]:
    counts = {len(step) for local_steps in hosts for step in local_steps}
    if len(counts) > 1:
        yield f"Closed shapes: steps have {sorted(counts)} micro-batches."
    for step, at_hosts in enumerate(zip(*hosts, strict=False)):
        for batches in zip(*at_hosts, strict=False):
            num_rows = sum(batch.bucket.batch_size for batch in batches)
            bucket = Bucket(num_rows, batches[0].bucket.seq_len)
            if bucket not in buckets:
                planned = ", ".join(map(str, sorted(buckets)))
                yield (
                    f"Closed shapes: step {step} has {bucket}, which is none of "
                    f"{planned}."
                )
            if bucket.num_tokens > max_tokens:
                yield (
                    f"Budget: step {step} has {bucket.num_tokens} tokens, more than "
                    f"`max_tokens={max_tokens}`."
                )


def _batches(hosts: list[list[Step]]) -> Iterator[tuple[int, int, Batch]]:
    """(host, step, batch) of all."""
    for host, local_steps in enumerate(hosts):
        for step, micro_batches in enumerate(local_steps):
            for batch in micro_batches:
                yield host, step, batch


def _arrays(hosts: list[list[Step]]) -> Iterator[str]:
    """The same arrays at every step of every host, of the same shapes in a bucket."""
    names: dict[str, str] = {}
    shapes: dict[tuple[int, str], list[int]] = {}
    for host, step, batch in _batches(hosts):
        where = f"Closed shapes: at step {step} host {host} has"
        arrays = dict(_arrays_of(batch))
        dtypes = {name: str(x.dtype) for name, x in arrays.items()}
        names = names or dtypes
        for name in sorted(dtypes.keys() | names.keys()):
            if dtypes.get(name) != names.get(name):
                yield (
                    f"{where} {name} of {dtypes.get(name)}, at step 0 "
                    f"{names.get(name)}."
                )
        for name, x in arrays.items():
            shape = list(x.shape)
            expected = shapes.setdefault((batch.bucket.seq_len, name), shape)
            if shape != expected:
                yield f"{where} {name} of {shape}, elsewhere in this bucket {expected}."
            if shape[:1] != [batch.bucket.batch_size]:
                yield f"{where} {name} of {shape} in bucket {batch.bucket}."
        for name, ids in batch.segment_ids.items():
            shape = getattr(batch.features.get(name), "shape", ())[:2]
            if shape != ids.shape:
                yield (
                    f"{where} features[{name!r}] of {list(shape)} beside segment ids "
                    f"of {list(ids.shape)}."
                )


def _arrays_of(batch: Batch) -> Iterator[tuple[str, np.ndarray]]:
    for part, arrays in zip(batch._fields, batch, strict=True):
        for name, x in arrays.items():
            yield f"{part}[{name!r}]", x


def _segments(hosts: list[list[Step]]) -> Iterator[str]:
    """Positions count from 0 where a segment begins, and are 0 in padding."""
    for host, step, batch in _batches(hosts):
        for name, ids in batch.segment_ids.items():
            if getattr(batch.positions.get(name), "shape", None) != ids.shape:
                yield (
                    f"Segments: at step {step} host {host} has no positions of "
                    f"{name!r} beside its segment ids."
                )
                continue
            steps = np.diff(ids, axis=1, prepend=0)
            # Behind the last segment there may be padding, and nothing else.
            if not np.isin(steps[ids > 0], (0, 1)).all() or np.any(
                (ids[:, :-1] == 0) & (ids[:, 1:] > 0)
            ):
                yield (
                    f"Segments: at step {step} host {host} has segment ids of "
                    f"{name!r} that do not count from 1, one after another."
                )
                continue
            begins = steps != 0
            places = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
            starts = np.maximum.accumulate(np.where(begins, places, 0), axis=1)
            expected = np.where(ids > 0, places - starts, 0)
            if not np.array_equal(batch.positions[name], expected):
                yield (
                    f"Segments: at step {step} host {host} has positions of {name!r} "
                    "that do not follow from its segment ids."
                )


def _exactly_once(
    hosts: list[list[Step]], num_examples: int, identity: str, left_out: int
) -> Iterator[str]:
    for host, step, batch in _batches(hosts):
        values = np.asarray(batch.features.get(identity))
        if values.dtype.kind not in "iu" or values.ndim not in (1, 2):
            yield (
                f"Exactly once: at step {step} host {host} has no feature {identity!r} "
                "of one integer for each example, which says who is in a row."
            )
            return
    parts = [_examples(batch, identity) for _, _, batch in _batches(hosts)]
    examples = np.concatenate([np.empty(0, np.int64), *parts])
    inside = (examples >= 0) & (examples < num_examples)
    if not inside.all():
        yield f"Exactly once: {_some(examples[~inside])} are no examples."
    counts = np.bincount(examples[inside], minlength=num_examples)
    missing, repeated = np.flatnonzero(counts == 0), np.flatnonzero(counts > 1)
    if len(missing) != left_out:
        named = f" ({_some(missing)})" if len(missing) else ""
        yield (
            f"Exactly once: {len(missing)} examples{named} are in no row, where "
            f"`left_out={left_out}` should be."
        )
    if len(repeated):
        yield f"Exactly once: examples {_some(repeated)} are in several rows."


def _examples(batch: Batch, identity: str) -> np.ndarray:
    ids = next(iter(batch.segment_ids.values()))
    names = np.asarray(batch.features[identity]).astype(np.int64)
    segments = ids.max(axis=1)
    if names.ndim == 1:
        return names[segments > 0]
    return names[np.arange(names.shape[1]) < segments[:, None]]


def _some(numbers: np.ndarray) -> str:
    return shortened([str(number) for number in numbers.tolist()], ", ")


def shortened(words: Sequence[str], separator: str) -> str:
    """The first few of some words, and how many more there are."""
    more = len(words) - _MAX_NAMED
    first = separator.join(words[:_MAX_NAMED])
    return f"{first} and {more} more" if more > 0 else first


def _resumed(
    again: Iterable[Batch | Step], expected: list[Step], host: int, start: int
) -> Iterator[str]:
    where = f"Resume: host {host}, begun at step {start},"
    steps = list(map(_copied, again))
    if len(steps) != len(expected):
        yield f"{where} has {len(steps)} steps where {len(expected)} are left."
    for step, (got, want) in enumerate(zip(steps, expected, strict=False), start):
        if not (len(got) == len(want) and all(map(_same, got, want))):
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
