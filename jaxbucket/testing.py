"""The invariants as checks that can be pointed at any loader, and at any loss.

A loader is whatever gives `Batch`es of numpy arrays for one host from a step on, or
tuples of them where a step has several. Each example says who it is in a feature of its
own, one integer for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

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
    hosts = [[_copy(step) for step in loader(host, 0)] for host in range(num_hosts)]
    broken = [
        *_lockstep(hosts),
        *_shapes(hosts, set(buckets), max_tokens),
        *_arrays(hosts),
        *_segments(hosts),
        *_exactly_once(hosts, num_examples, identity, left_out),
    ]
    steps = list(range(len(hosts[0])) if resume_at is None else resume_at)
    for host, own in enumerate(hosts):
        for step in steps:
            broken += _resumed(loader(host, step), own[step:], host, step)
    if broken:
        raise AssertionError("\n".join(broken))


_REMEDIES = {
    "with its rows in another order": (
        "What a row gives may depend on its features and its key, not on its place. "
        "Draw dropout row by row, by `jax.vmap` over `keys`, and number rows by "
        "`jaxbucket.train.row_numbers(batch)`."
    ),
    "in two halves, as on two devices": (
        "It looks at other rows, or returns a mean: return sums over the rows it is "
        "given, get those of all devices by `jaxbucket.train.gather_rows(x)`, and the places "
        "of its own among them by `jaxbucket.train.row_numbers(batch)`."
    ),
    "beside a device that has only empty rows": (
        "Empty rows count: multiply by `batch.mask`, and divide by nothing that is 0 "
        "where every row is empty."
    ),
    "with other values in its padding": (
        "Padding counts: multiply what is summed by `batch.mask`, and let no position "
        "attend to where `batch.segment_ids` is 0, nor to rows that are empty."
    ),
    "with as many columns again, all of padding": (
        "T counts: take no mean over an axis of T, nor T for a weight, but sums and "
        "counts of `batch.mask`. A model with a table of T places needs a batch that "
        "is at most half as long."
    ),
    "with every packed example in a row of its own": (
        "Examples that share a row see each other: take targets from "
        "`jaxbucket.next_tokens`, places from `batch.positions`, a mean over each "
        'example from `token_weights(batch, "sequence")`, and attention within '
        "`batch.segment_ids`, as `segment_attention` has it."
    ),
}


def check_loss(
    loss_fn: Callable[..., tuple],
    model: Any,
    batch: Batch,
    *,
    seed: int | None = 0,
    sequences: Collection[str] | None = None,
    tolerance: float = 1e-4,
) -> None:
    """Checks that a loss is a sum over rows, however they are spread over devices.

    Loss, weight, all further sums and the gradients of a batch must be finite, and the
    same with its rows in another order, in two halves as on two devices, beside a
    device that has only empty rows, with other values where it is padding, with as many
    columns again, all of padding, and with every packed example in a row of its own.
    The halves are mapped over one device, with an axis for `gather_rows`. The last two
    are compared with keys None, because what is drawn for a row depends on its T, and
    left out for a loss that fails without keys.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxbucket as jb
      >>> rows = [{"x": [1.0, 2.0]}, {"x": [3.0]}]
      >>> batch = jb.data.collate_rows(rows, jb.Bucket(2, 4))
      >>> def loss_fn(params, batch, keys):
      ...     losses = (params["w"] - batch.features["x"]) ** 2
      ...     return jnp.sum(losses, where=batch.mask), batch.num_tokens
      >>> check_loss(loss_fn, {"w": jnp.float32(0)}, batch)

    Args:
      loss_fn: the loss, see the top of `jaxbucket.train.loss`.
      model: an NNX module, or parameters.
      batch: a real one of at least two rows that hold examples, padded or packed, of
        numpy or jax. A small one will do.
      seed: what the keys of the rows are derived from, as in `data_parallel`; None to
        call the loss with keys None, as evaluation does.
      sequences: the features that are padded, by default all of shape `[B, T, ...]`.
        Name them where others may have that shape by chance.
      tolerance: by how much results may differ, relative to what the halves of the
        batch have, which may cancel. Models that compute in half precision need 1e-2.

    Raises:
      AssertionError: if results differ, with what differs and how to mend it; if they
        are not finite.
      ValueError: if the batch has fewer than two rows with examples, or the loss
        breaks the contract.
    """
    import jax
    import optax

    from jaxbucket.train.loss import row_keys
    from jaxbucket.train.rows import MappedRows, rows_at_hand
    from jaxbucket.train.step import create_state, gradient_sums

    if not isinstance(batch, Batch):
        raise ValueError(
            f"`batch` is a {type(batch).__name__}: give one `jaxbucket.Batch`."
        )
    (batch,) = _copy(batch)
    filled = _filled_rows(batch)
    if filled.sum() < 2:
        raise ValueError(
            f"`batch` has {filled.sum()} rows with examples, of which nothing can be "
            "told: give one of at least two."
        )
    if len(filled) % 2:
        batch = _with_empty_rows(batch, 1)
    num_rows = batch.bucket.batch_size
    state = create_state(model, optax.identity())
    gradients = gradient_sums(loss_fn)
    whole = jax.jit(gradients)
    halves = MappedRows(("halves of the batch",))

    @jax.jit
    def in_halves(state: Any, batch: Batch, keys: Any) -> Any:
        def of_half(batch: Batch, keys: Any) -> Any:
            with rows_at_hand(halves):
                return gradients(state, batch, keys)

        cut, keys = jax.tree.map(
            lambda x: x.reshape(2, -1, *x.shape[1:]), (batch, keys)
        )
        return jax.vmap(of_half, axis_name=halves.axes[0])(cut, keys)

    def added(of_halves: Any) -> Any:
        return jax.tree.map(lambda x: x[0] + x[1], of_halves)

    def keys_of(rows: np.ndarray) -> Any:
        return None if seed is None else row_keys(seed, 0, 0, 2 * num_rows)[rows]

    rows = np.arange(num_rows)
    order = np.random.default_rng(0).permutation(num_rows)
    if np.array_equal(order, rows):
        order = rows[::-1]
    all_rows = np.arange(2 * num_rows)
    beside_empty = _with_empty_rows(batch, num_rows)
    expected = whole(state, batch, keys_of(rows))
    _check_finite(expected)
    of_halves = in_halves(state, batch, keys_of(rows))
    scale = jax.tree.map(_scale, of_halves)

    def check(how: str, results: Any, expected: Any = expected) -> None:
        differences = [
            *_differing_sums(results[1], expected[1], scale[1], tolerance),
            *_differing_gradients(results[0], expected[0], scale[0], tolerance),
        ]
        if differences:
            raise AssertionError(
                f"`loss_fn` gives something else for the batch {how}: "
                f"{_listed(differences)}. {_REMEDIES[how]}"
            )

    shuffled = _take_rows(batch, order)
    check("with its rows in another order", whole(state, shuffled, keys_of(order)))
    check("in two halves, as on two devices", added(of_halves))
    of_halves = in_halves(state, beside_empty, keys_of(all_rows))
    check("beside a device that has only empty rows", added(of_halves))
    refilled = _with_other_padding(beside_empty, sequences)
    of_halves = in_halves(state, refilled, keys_of(all_rows))
    check("with other values in its padding", added(of_halves))
    if seed is not None:
        try:
            expected = whole(state, batch, None)
        except Exception:
            return
    longer = _with_more_columns(batch, sequences)
    how = "with as many columns again, all of padding"
    check(how, whole(state, longer, None), expected)
    if _is_packed(batch):
        alone = _without_neighbours(batch, sequences)
        how = "with every packed example in a row of its own"
        check(how, whole(state, alone, None), expected)


def _check_finite(results: Any) -> None:
    import jax

    gradients, sums = results
    infinite = [f"{name!r} is {x}" for name, x in sums.items() if not np.isfinite(x)]
    infinite += [
        f"the gradient of {jax.tree_util.keystr(path)}"
        for path, x in jax.tree.leaves_with_path(gradients)
        if not np.isfinite(x).all()
    ]
    if infinite:
        raise AssertionError(
            f"`loss_fn` is not finite for the batch as it is: {_listed(infinite)}. "
            "Look for a division by 0, or a logarithm of it, where a row is padding, "
            "and choose by `jnp.where` what goes in as well as what comes out."
        )


def _scale(of_halves: Any) -> float:
    """What rounding is relative to, also where the halves cancel."""
    halves = np.asarray(of_halves, np.float64).reshape(2, -1)
    scale = np.linalg.norm(halves, axis=1).sum()
    return float(scale) if np.isfinite(scale) else 0.0


def _differing_sums(
    results: Any, expected: Any, scale: Any, tolerance: float
) -> Iterator[str]:
    for name, x in expected.items():
        if name in ("num_rows", "num_positions"):
            continue
        want, got = np.asarray(x), np.asarray(results[name])
        # Sums of integers wrap around, and are exact all the same.
        exact = want.dtype.kind in "iu"
        if got != want if exact else not _close(got, want, tolerance, scale[name]):
            yield f"{name!r} is {got:.7g}, not {want:.7g}"


def _differing_gradients(
    results: Any, expected: Any, scale: Any, tolerance: float
) -> Iterator[str]:
    import jax

    scales = jax.tree.leaves(scale)
    # One that is 0 but for rounding is that only beside the others.
    floor = 1e-2 * max(scales, default=0.0)
    for (path, x), y, of_halves in zip(
        jax.tree.leaves_with_path(expected),
        jax.tree.leaves(results),
        scales,
        strict=True,
    ):
        want, got = np.asarray(x, np.float64), np.asarray(y, np.float64)
        if not _close(got, want, tolerance, max(floor, of_halves)):
            apart = np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)
            off = f"off by {apart:.1%}" if np.isfinite(apart) else "not finite"
            yield f"the gradient of {jax.tree_util.keystr(path)} is {off}"


def _close(got: np.ndarray, want: np.ndarray, tolerance: float, floor: float) -> bool:
    """Whether they are, and are finite."""
    return bool(
        np.linalg.norm(got - want) <= tolerance * max(np.linalg.norm(want), floor)
    )


def _listed(words: Sequence[str]) -> str:
    more = len(words) - _MAX_NAMED
    listed = "; ".join(words[:_MAX_NAMED])
    return f"{listed}; and {more} more" if more > 0 else listed


def _filled_rows(batch: Batch) -> np.ndarray:
    """`[B]` bool: rows that hold an example."""
    return next(iter(batch.segment_ids.values())).max(axis=1) > 0


def _take_rows(batch: Batch, rows: np.ndarray) -> Batch:
    return Batch(*({name: x[rows] for name, x in part.items()} for part in batch))


def _with_empty_rows(batch: Batch, count: int) -> Batch:
    """So many rows more, of zeros."""

    def longer(x: np.ndarray) -> np.ndarray:
        return np.concatenate([x, np.zeros((count, *x.shape[1:]), x.dtype)])

    return Batch(*({name: longer(x) for name, x in part.items()} for part in batch))


def _with_other_padding(batch: Batch, sequences: Collection[str] | None) -> Batch:
    """Real values of other places wherever none is real."""
    features = {}
    for name, x in batch.features.items():
        features[name] = _refilled(x, _real_places(batch, name, sequences))
    return batch._replace(features=features)


def _with_more_columns(batch: Batch, sequences: Collection[str] | None) -> Batch:
    """As many again, of zeros."""

    def longer(x: np.ndarray) -> np.ndarray:
        return np.concatenate([x, np.zeros_like(x)], axis=1)

    features = {
        name: longer(x) if _sequence_of(batch, name, sequences) else x
        for name, x in batch.features.items()
    }
    segment_ids = {name: longer(x) for name, x in batch.segment_ids.items()}
    positions = {name: longer(x) for name, x in batch.positions.items()}
    return Batch(features, segment_ids, positions)


def _without_neighbours(batch: Batch, sequences: Collection[str] | None) -> Batch:
    """Every example in a row of its own, in the first place."""
    counts = next(iter(batch.segment_ids.values())).max(axis=1)
    rows, segments = np.nonzero(np.arange(counts.max()) < counts[:, None])
    columns, real = {}, {}
    for name, ids in batch.segment_ids.items():
        is_own = ids[rows] == segments[:, None] + 1
        columns[name] = np.argsort(~is_own, axis=1, kind="stable")
        real[name] = np.take_along_axis(is_own, columns[name], axis=1)

    def alone(x: np.ndarray, sequence: str) -> np.ndarray:
        moved = x[rows[:, None], columns[sequence]]
        moved[~real[sequence]] = 0
        return moved

    def of_example(x: np.ndarray) -> np.ndarray:
        if not _is_stacked(batch, x):
            return x[rows]
        first = np.zeros_like(x[rows])
        first[:, 0] = x[rows, segments]
        return first

    features = {}
    for name, x in batch.features.items():
        sequence = _sequence_of(batch, name, sequences)
        features[name] = alone(x, sequence) if sequence else of_example(x)
    segment_ids = {name: x.astype(np.int32) for name, x in real.items()}
    positions = {name: alone(x, name) for name, x in batch.positions.items()}
    return Batch(features, segment_ids, positions)


def _real_places(
    batch: Batch, name: str, sequences: Collection[str] | None
) -> np.ndarray:
    """`[B]`, or `[B, T]` of sequences, or `[B, S]` of packed examples: where one is."""
    sequence = _sequence_of(batch, name, sequences)
    if sequence is not None:
        return batch.segment_ids[sequence] > 0
    segments = next(iter(batch.segment_ids.values())).max(axis=1)
    x = batch.features[name]
    if _is_stacked(batch, x):
        return np.arange(x.shape[1]) < segments[:, None]
    return segments > 0


def _sequence_of(
    batch: Batch, name: str, sequences: Collection[str] | None
) -> str | None:
    """The entry in `segment_ids` of a feature `[B, T, ...]`; None of others."""
    if name in batch.segment_ids:
        return name
    if sequences is not None and name not in sequences:
        return None
    shape = batch.features[name].shape[:2]
    same = (key for key, ids in batch.segment_ids.items() if ids.shape == shape)
    return next(same, None)


def _is_stacked(batch: Batch, x: np.ndarray) -> bool:
    """Whether what is no sequence is `[B, S, ...]`, of packed examples."""
    return x.ndim > 1 and _is_packed(batch)


def _is_packed(batch: Batch) -> bool:
    return bool(next(iter(batch.segment_ids.values())).max() > 1)


def _refilled(x: np.ndarray, real: np.ndarray) -> np.ndarray:
    values, places = x[real], np.flatnonzero(~real)
    refilled = x.copy()
    # Backwards, so that a place next to a real one does not repeat it.
    refilled[~real] = values[::-1][np.arange(len(places)) % len(values)]
    return refilled


def _copy(step: Batch | Step) -> Step:
    """A loader may use its arrays again."""
    micro = (step,) if isinstance(step, Batch) else step
    if not isinstance(micro, tuple) or not all(isinstance(x, Batch) for x in micro):
        raise ValueError(
            f"`loader` gives a {type(step).__name__} where a `jaxbucket.Batch` is "
            "expected, or a tuple of them. `collate_rows` makes one of examples, and "
            "`Batch({'x': x}, {'x': segment_ids}, {'x': positions})` one of arrays, "
            "with segment ids 1 for tokens and 0 for padding."
        )
    return tuple(
        Batch(*({name: np.array(x) for name, x in part.items()} for part in batch))
        for batch in micro
    )


def _lockstep(hosts: list[list[Step]]) -> Iterator[str]:
    steps = [len(own) for own in hosts]
    if len(set(steps)) > 1:
        yield f"Lockstep: hosts have {steps} steps."
    for step, at_hosts in enumerate(zip(*hosts, strict=False)):
        lengths = [[batch.bucket.seq_len for batch in micro] for micro in at_hosts]
        if any(own != lengths[0] for own in lengths):
            words = [own[0] if len(own) == 1 else own for own in lengths]
            yield f"Lockstep: at step {step} hosts have T of {words}."


def _shapes(
    hosts: list[list[Step]], buckets: set[Bucket], max_tokens: int
) -> Iterator[str]:
    numbers = {len(micro) for own in hosts for micro in own}
    if len(numbers) > 1:
        yield f"Closed shapes: steps have {sorted(numbers)} micro-batches."
    for step, at_hosts in enumerate(zip(*hosts, strict=False)):
        for batches in zip(*at_hosts, strict=False):
            num_rows = sum(batch.bucket.batch_size for batch in batches)
            found = Bucket(num_rows, batches[0].bucket.seq_len)
            if found not in buckets:
                known = ", ".join(map(str, sorted(buckets)))
                yield (
                    f"Closed shapes: step {step} has {found}, which is none of {known}."
                )
            if found.num_tokens > max_tokens:
                yield (
                    f"Budget: step {step} has {found.num_tokens} tokens, more than "
                    f"`max_tokens={max_tokens}`."
                )


def _batches(hosts: list[list[Step]]) -> Iterator[tuple[int, int, Batch]]:
    """(host, step, batch) of all."""
    for host, own in enumerate(hosts):
        for step, micro in enumerate(own):
            for batch in micro:
                yield host, step, batch


def _arrays(hosts: list[list[Step]]) -> Iterator[str]:
    """The same arrays at every step of every host, of the same shapes in a bucket."""
    names: dict[str, str] = {}
    shapes: dict[tuple[int, str], list[int]] = {}
    for host, step, batch in _batches(hosts):
        where = f"Closed shapes: at step {step} host {host} has"
        found = dict(_leaves(batch))
        dtypes = {name: str(x.dtype) for name, x in found.items()}
        names = names or dtypes
        for name in sorted(dtypes.keys() | names.keys()):
            if dtypes.get(name) != names.get(name):
                yield (
                    f"{where} {name} of {dtypes.get(name)}, at step 0 "
                    f"{names.get(name)}."
                )
        for name, x in found.items():
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


def _leaves(batch: Batch) -> Iterator[tuple[str, np.ndarray]]:
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
    found = np.concatenate([np.empty(0, np.int64), *parts])
    inside = (found >= 0) & (found < num_examples)
    if not inside.all():
        yield f"Exactly once: {_some(found[~inside])} are no examples."
    counts = np.bincount(found[inside], minlength=num_examples)
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


def _some(numbers: Sequence[int] | np.ndarray) -> str:
    named = ", ".join(str(int(number)) for number in numbers[:_MAX_NAMED])
    more = len(numbers) - _MAX_NAMED
    return f"{named} and {more} more" if more > 0 else named


def _resumed(
    again: Iterable[Batch | Step], expected: list[Step], host: int, start: int
) -> Iterator[str]:
    where = f"Resume: host {host}, begun at step {start},"
    found = [_copy(micro) for micro in again]
    if len(found) != len(expected):
        yield f"{where} has {len(found)} steps where {len(expected)} are left."
    for step, (a, b) in enumerate(zip(found, expected, strict=False), start):
        if not (len(a) == len(b) and all(map(_same, a, b))):
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
