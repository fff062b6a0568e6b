"""Streams of examples of known lengths, and hosts that read parts of them."""

import concurrent.futures
import dataclasses
import itertools
import json
import threading

import grain
import jax
import numpy as np
import pytest

import jaxbucket as jb

# Options of `stream_batches` in pairs that together have each value.
OPTIONS = [
    {},
    {"policy": "first"},
    {"accumulate": 3},
    {"accumulate": 2, "group": "mixed"},
    {"max_segments_per_row": 6},
    {"max_segments_per_row": 6, "policy": "first"},
    {"max_segments_per_row": 3, "accumulate": 2, "group": "mixed"},
]
LIKE = {"tokens": np.zeros(1, np.int32), "index": np.int32(0)}
_OF_EXAMPLES = [field.name for field in dataclasses.fields(jb.stream.ExampleStream)]


def exhaustive(values):
    """Returns parameters that run only with `-m exhaustive`."""
    return [pytest.param(x, marks=pytest.mark.exhaustive) for x in values]


SOME_OPTIONS = [
    *(OPTIONS[k] for k in (0, 3, 6)),
    *exhaustive(OPTIONS[k] for k in (1, 2, 4, 5)),
]


class Numbers:
    """Examples of given lengths, with tokens that depend on their index."""

    def __init__(self, lengths: np.ndarray, first: int = 0):
        self.lengths = lengths
        self.first = first

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        number = self.first + int(index)
        tokens = (number * 31 + np.arange(self.lengths[index])) % 1000
        return {"tokens": tokens.astype(np.int32), "index": np.int32(number)}


def stream(lengths: np.ndarray, first: int = 0) -> grain.IterDataset:
    source = grain.MapDataset.source(Numbers(lengths, first))
    return source.to_iter_dataset(grain.ReadOptions(num_threads=0))


def batches_of(dataset, plan, **options):
    """Returns batches, with the options of `stream_batches` and `ExampleStream`."""
    given = {name: options.pop(name) for name in _OF_EXAMPLES if name in options}
    return jb.stream_batches(jb.stream.ExampleStream(dataset, **given), plan, **options)


def steps_of(batches) -> list[tuple[jb.Batch, ...]]:
    return [(x,) if isinstance(x, jb.Batch) else x for x in batches]


def indices_in(batch: jb.Batch) -> list[int]:
    """Checks the tokens of a batch, and returns the indices of its examples."""
    is_packed = batch.features["index"].ndim == 2
    max_segments = batch.features["index"].shape[1] if is_packed else None
    examples = jb.data.unbatch(batch, sequences=["tokens"], max_segments=max_segments)
    for example in examples:
        index = int(example["index"])
        want = (index * 31 + np.arange(len(example["tokens"]))) % 1000
        assert example["tokens"].tolist() == want.tolist()
    return [int(example["index"]) for example in examples]


def indices_of(steps) -> list[int]:
    return [i for micro in steps for batch in micro for i in indices_in(batch)]


def make_case(seed: int, size: int | None = None, multiple: int = 1, longest: int = 60):
    """Returns random lengths, a plan for them, and the generator that drew them."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 400)) if size is None else size
    lengths = np.minimum(1 + rng.geometric(3 / longest, size), longest)
    plan = jb.plan_buckets(
        np.append(lengths, longest),
        sample=True,
        max_tokens=longest * multiple * int(rng.integers(2, 7)),
        num_buckets=int(rng.integers(1, 6)),
        batch_size_multiple=multiple,
    )
    return lengths, plan, rng


def smallest_pool(plan: jb.BucketPlan, options: dict) -> int:
    is_mixed = options.get("group") == "mixed"
    batches = 1 if is_mixed else options.get("accumulate", 1)
    return int(plan.batch_sizes.max()) * batches


def assert_same(batches, want) -> None:
    """Asserts that two lists of steps have the same arrays."""
    assert len(batches) == len(want)
    for a, b in zip(batches, want, strict=True):
        assert jax.tree.structure(a) == jax.tree.structure(b)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())


def through_json(state):
    return json.loads(json.dumps(state))


class Threads:
    """Lets threads of a test exchange values like the processes of a run."""

    def __init__(self, count: int):
        self.count = count
        self.values = [""] * count
        self.barrier = threading.Barrier(count, timeout=60)
        self.num_gathers = 0

    def of(self, index: int) -> "Thread":
        return Thread(self, index)


@dataclasses.dataclass
class Thread:
    """The process group of one thread."""

    all: Threads
    index: int

    @property
    def count(self) -> int:
        return self.all.count

    def gather(self, name: str, value: str) -> list[str]:
        assert name.startswith("stream ")
        self.all.values[self.index] = value
        if self.all.barrier.wait() == 0:
            self.all.num_gathers += 1
        values = list(self.all.values)
        self.all.barrier.wait()
        return values


def in_threads(functions):
    with concurrent.futures.ThreadPoolExecutor(len(functions)) as pool:
        return [x.result() for x in [pool.submit(f) for f in functions]]


def drive(hosts, steps: int | None = None):
    """Returns the steps of each host, by default until all of them end."""
    return in_threads(
        [lambda host=host: steps_of(itertools.islice(host, steps)) for host in hosts]
    )


def each_refuses(hosts, match: str) -> None:
    """Asserts that the first steps of all hosts raise an error."""

    def check(host):
        with pytest.raises(ValueError, match=match):
            next(host)

    in_threads([lambda host=host: check(host) for host in hosts])


def parts_of(lengths, shares):
    """Yields the index of each host, its first example, and its lengths."""
    ends = np.cumsum(shares) * len(lengths) // sum(shares)
    for host, (start, end) in enumerate(itertools.pairwise([0, *ends.tolist()])):
        yield host, start, lengths[start:end]


def hosts_of(
    lengths, plan, shares, pool_size, sample=None, meet=True, make=stream, **options
):
    """Returns an iterator for each host, over its share of the examples.

    `make` returns the stream of some lengths, given the index of the first example.
    """
    threads = Threads(len(shares))
    given = {"pool_size": pool_size, "like": LIKE, **options}
    given["lengths"] = lengths if sample is None else sample
    return [
        iter(
            batches_of(
                make(part, first=start),
                plan,
                shard=jb.data.RowShard((host,), len(shares)),
                processes=threads.of(host) if meet else None,
                **given,
            )
        )
        for host, start, part in parts_of(lengths, shares)
    ]


def assert_resume(make, start: int, whole, before=None) -> None:
    """Asserts that hosts go on at a step, after others have loaded ahead of it.

    Args:
      make: returns new hosts.
      start: the step.
      whole: all steps of each host.
      before: returns the hosts whose states are saved, by default `make`.
    """
    saved, after = (before or make)(), make()
    drive(saved, start + 3)
    for host, loaded in zip(after, saved, strict=True):
        host.set_state(through_json(loaded.state_before(start)))
    for rest, steps in zip(drive(after), whole, strict=True):
        assert_same(rest, steps[start:])
