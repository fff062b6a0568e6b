"""Checks of the data invariants for any loader.

A loader yields the batches of one host from a given step on: a `Batch` of numpy arrays
per step, or a tuple of them with accumulation. A feature with one integer per example
identifies the examples.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from jaxbucket.base.batch import Batch
from jaxbucket.base.bucket import Bucket
from jaxbucket.base.checks import check_positive
from jaxbucket.base.sizes import Sizes

Step: TypeAlias = tuple[Batch, ...]
Loader: TypeAlias = Callable[[int, int], Iterable[Batch | Step]]

_MAX_SHOWN = 5


def check_batches(
    loader: Loader,
    *,
    num_examples: int,
    buckets: Collection[Bucket],
    max_tokens: int,
    num_hosts: int = 1,
    index_feature: str = "index",
    num_dropped: int = 0,
    num_repeated: int = 0,
    resume_at: Iterable[int] | None = None,
) -> None:
    """Checks the invariants of one epoch of a loader, over all its hosts.

    Example:
      >>> import jaxbucket as jb
      >>> source = [{"x": [0] * n, "index": i} for i, n in enumerate((3, 1, 4, 2))]
      >>> plan = jb.plan_buckets([3, 1, 4, 2], max_tokens=8)
      >>> schedule = jb.BatchSchedule(plan, [3, 1, 4, 2])
      >>> def loader(host, start_step):
      ...     return jb.batch_dataset(source, schedule, start_step=start_step)
      >>> check_batches(loader, num_examples=4, buckets=plan.buckets, max_tokens=8)

    Args:
      loader: `(host, start_step) -> batches`, the rows of a host in the batches of the
        epoch from `start_step` on.
      num_examples: the number of examples, which are identified by 0, 1, ...
      buckets: the shapes (B, T) that global batches may have.
      max_tokens: the maximum of B * T.
      num_hosts: the number of hosts. No two hosts have the same rows.
      index_feature: the feature that identifies the examples: `[B]`, or
        `[B, max_segments]` if rows are packed.
      num_dropped: the number of examples that the epoch leaves out on purpose.
      num_repeated: the number of rows, or examples in packed rows, that repeat an
        example of the epoch on purpose.
      resume_at: the steps at which to resume, by default all steps.

    Raises:
      AssertionError: if an invariant is violated, with a line for each violation. The
        invariants are fixed shapes (and dtypes) of all arrays, the token budget, the
        same shapes and number of steps on all hosts, each example in exactly one row,
        and the same batches after resuming.
      ValueError: if `num_hosts` is not positive, or the loader does not yield batches.
    """
    check_positive("num_hosts", num_hosts)
    hosts = [list(map(_copy, loader(host, 0))) for host in range(num_hosts)]
    violations = [
        *_lockstep(hosts),
        *_shapes(hosts, set(buckets), max_tokens),
        *_arrays(hosts),
        *_segments(hosts),
        *_exactly_once(hosts, num_examples, index_feature, num_dropped, num_repeated),
    ]
    steps = list(range(len(hosts[0])) if resume_at is None else resume_at)
    for host, local_steps in enumerate(hosts):
        for step in steps:
            violations += _resume(loader(host, step), local_steps[step:], host, step)
    if violations:
        raise AssertionError("\n".join(violations))


def _copy(step: Batch | Step) -> Step:
    """Returns copies of a step's micro-batches, because a loader may reuse arrays."""
    micro_batches = (step,) if isinstance(step, Batch) else step
    is_tuple = isinstance(micro_batches, tuple)
    if not is_tuple or not all(isinstance(x, Batch) for x in micro_batches):
        raise ValueError(
            f"`loader` yielded a {type(step).__name__}, not a `jaxbucket.Batch` or a "
            "tuple of them. Create batches from examples with `collate_rows`, or from "
            "arrays with `Batch({'x': x}, {'x': segment_ids}, {'x': positions})`, with "
            "segment ids 1 for tokens and 0 for padding."
        )
    return tuple(
        Batch(*({name: np.array(x) for name, x in part.items()} for part in batch))
        for batch in micro_batches
    )


def _lockstep(hosts: list[list[Step]]) -> Iterator[str]:
    """Yields a line for each difference in shape or number of steps between hosts."""
    num_steps = list(map(len, hosts))
    if len(set(num_steps)) > 1:
        yield f"Lockstep: hosts have {num_steps} steps."
    for step, groups in enumerate(zip(*hosts, strict=False)):
        seq_lens = [[batch.bucket.seq_len for batch in group] for group in groups]
        if any(local != seq_lens[0] for local in seq_lens):
            shown = [x[0] if len(x) == 1 else x for x in seq_lens]
            yield f"Lockstep: at step {step}, the hosts have different T: {shown}."


def _shapes(
    hosts: list[list[Step]], buckets: set[Bucket], max_tokens: int
) -> Iterator[str]:
    """Yields a line for each global batch outside the buckets or the token budget."""
    counts = {len(step) for local_steps in hosts for step in local_steps}
    if len(counts) > 1:
        yield f"Fixed shapes: steps have {sorted(counts)} micro-batches."
    for step, groups in enumerate(zip(*hosts, strict=False)):
        for batches in zip(*groups, strict=False):
            num_rows = sum(batch.bucket.batch_size for batch in batches)
            bucket = Bucket(num_rows, batches[0].bucket.seq_len)
            if bucket not in buckets:
                planned = ", ".join(map(str, sorted(buckets)))
                yield (
                    f"Fixed shapes: step {step} has shape {bucket}, which is not in "
                    f"{planned}."
                )
            if bucket.num_tokens > max_tokens:
                yield (
                    f"Budget: step {step} has {bucket.num_tokens} tokens, more than "
                    f"`max_tokens={max_tokens}`."
                )


def _batches(hosts: list[list[Step]]) -> Iterator[tuple[int, int, Batch]]:
    """Yields `(host, step, batch)` for all batches."""
    for host, local_steps in enumerate(hosts):
        for step, micro_batches in enumerate(local_steps):
            for batch in micro_batches:
                yield host, step, batch


def _arrays(hosts: list[list[Step]]) -> Iterator[str]:
    """Yields a line for each array whose name, dtype or shape differs from others."""
    names: dict[str, str] = {}
    shapes: dict[tuple[int | Sizes, str], list[int]] = {}
    for host, step, batch in _batches(hosts):
        prefix = f"Fixed shapes: at step {step}, host {host} has"
        arrays = dict(_arrays_of(batch))
        dtypes = {name: str(x.dtype) for name, x in arrays.items()}
        names = names or dtypes
        for name in sorted(dtypes.keys() | names.keys()):
            if dtypes.get(name) != names.get(name):
                yield (
                    f"{prefix} {name} with dtype {dtypes.get(name)}, but "
                    f"{names.get(name)} at step 0."
                )
        for name, x in arrays.items():
            shape = list(x.shape)
            expected = shapes.setdefault((batch.bucket.seq_len, name), shape)
            if shape != expected:
                yield (
                    f"{prefix} {name} with shape {shape}, but {expected} elsewhere in "
                    "this bucket."
                )
            if shape[:1] != [batch.bucket.batch_size]:
                yield f"{prefix} {name} with shape {shape} in bucket {batch.bucket}."
        for name, ids in batch.segment_ids.items():
            shape = getattr(batch.features.get(name), "shape", ())[:2]
            if shape != ids.shape:
                yield (
                    f"{prefix} features[{name!r}] with shape {list(shape)}, but "
                    f"segment ids with shape {list(ids.shape)}."
                )


def _arrays_of(batch: Batch) -> Iterator[tuple[str, np.ndarray]]:
    """Yields all arrays of a batch with their names, such as `features['x']`."""
    for part, arrays in zip(batch._fields, batch, strict=True):
        for name, x in arrays.items():
            yield f"{part}[{name!r}]", x


def _segments(hosts: list[list[Step]]) -> Iterator[str]:
    """Yields a line for each batch whose segment ids or positions are inconsistent.

    Positions count from 0 in each segment, and are 0 in padding.
    """
    for host, step, batch in _batches(hosts):
        for name, ids in batch.segment_ids.items():
            if getattr(batch.positions.get(name), "shape", None) != ids.shape:
                yield (
                    f"Segments: at step {step}, host {host} has no positions of "
                    f"{name!r} that match its segment ids."
                )
                continue
            steps = np.diff(ids, axis=1, prepend=0)
            # Only padding may follow the last segment.
            # An example may lack one of several sequences.
            largest = 1 if len(batch.segment_ids) == 1 else steps.max(initial=0)
            is_ordered = (0 <= steps) & (steps <= largest)
            if not is_ordered[ids > 0].all() or np.any(
                (ids[:, :-1] == 0) & (ids[:, 1:] > 0)
            ):
                yield (
                    f"Segments: at step {step}, host {host} has segment ids of "
                    f"{name!r} that are not 1, 2, ... in order."
                )
                continue
            columns = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
            starts = np.maximum.accumulate(np.where(steps != 0, columns, 0), axis=1)
            expected = np.where(ids > 0, columns - starts, 0)
            if not np.array_equal(batch.positions[name], expected):
                yield (
                    f"Segments: at step {step}, host {host} has positions of {name!r} "
                    "that do not restart at 0 in each segment."
                )


def _exactly_once(
    hosts: list[list[Step]],
    num_examples: int,
    index_feature: str,
    num_dropped: int,
    num_repeated: int,
) -> Iterator[str]:
    """Yields a line for each way in which examples are missing, repeated or unknown."""
    for host, step, batch in _batches(hosts):
        values = np.asarray(batch.features.get(index_feature))
        if values.dtype.kind not in "iu" or values.ndim not in (1, 2):
            yield (
                f"Exactly once: at step {step}, host {host} has no feature "
                f"{index_feature!r} with one integer per example that identifies it. "
                "Pass `index_feature`."
            )
            return
    parts = [_examples(batch, index_feature) for _, _, batch in _batches(hosts)]
    examples = np.concatenate([np.empty(0, np.int64), *parts])
    known = (examples >= 0) & (examples < num_examples)
    if not known.all():
        yield (
            f"Exactly once: {_format_numbers(examples[~known])} are not between 0 and "
            f"{num_examples - 1}."
        )
    counts = np.bincount(examples[known], minlength=num_examples)
    missing, repeated = np.flatnonzero(counts == 0), np.flatnonzero(counts > 1)
    if len(missing) != num_dropped:
        shown = f" ({_format_numbers(missing)})" if len(missing) else ""
        yield (
            f"Exactly once: {len(missing)} examples{shown} are in no row, but "
            f"`num_dropped={num_dropped}`."
        )
    if np.sum(counts[repeated] - 1) != num_repeated:
        yield f"Exactly once: examples {_format_numbers(repeated)} are in several rows."


def _examples(batch: Batch, index_feature: str) -> np.ndarray:
    """Returns the identities of all examples of a batch, `[num_examples]`."""
    identities = np.asarray(batch.features[index_feature]).astype(np.int64)
    if identities.ndim == 1:
        return identities[batch.row_mask]
    slots = np.arange(identities.shape[1])
    return identities[slots < batch.segments_per_row[:, None]]


def _format_numbers(numbers: np.ndarray) -> str:
    return shorten([str(number) for number in numbers.tolist()], ", ")


def shorten(items: Sequence[str], separator: str) -> str:
    """Joins the first few items, and adds the number of the others."""
    num_more = len(items) - _MAX_SHOWN
    first = separator.join(items[:_MAX_SHOWN])
    return f"{first} and {num_more} more" if num_more > 0 else first


def _resume(
    batches: Iterable[Batch | Step], expected: list[Step], host: int, start: int
) -> Iterator[str]:
    """Yields a line for each difference between a resumed and an unbroken epoch."""
    prefix = f"Resume: host {host}, resumed at step {start},"
    steps = list(map(_copy, batches))
    if len(steps) != len(expected):
        yield f"{prefix} yields {len(steps)} steps instead of {len(expected)}."
    for step, (got, want) in enumerate(zip(steps, expected, strict=False), start):
        if not (len(got) == len(want) and all(map(_are_equal, got, want))):
            yield f"{prefix} yields a different batch at step {step}."
            return


def _are_equal(a: Batch, b: Batch) -> bool:
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
