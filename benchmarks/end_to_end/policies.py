"""Four batching methods for the same documents and the same limit on B * T.

* bucketed: a few shapes, which are all compiled before the first step.
* pad-to-max: one shape, as long as the longest document.
* dynamic: as many documents as fit in the limit, padded to the longest of them. Every
  batch has its own shape, and `jax.jit` compiles for each new one.
* grain-pack: one shape; Grain packs several documents into each row.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import grain
import jax
import numpy as np
from example import documents

import jaxbucket as jb

POLICIES = ("bucketed", "pad-to-max", "dynamic", "grain-pack")
# Batches of these policies are a function of the step, so runs can be resumed.
RESUMABLE = ("bucketed", "pad-to-max")
_PACKING_BINS = 64


class Limits(NamedTuple):
    """The limits of every batch."""

    max_tokens: int
    max_len: int
    batch_size_multiple: int


class Jitted:
    """A jitted step without a plan, which records the time of each compilation."""

    def __init__(self, step_fn: Callable[[Any, jb.Batch], Any]):
        self._step_fn = step_fn
        self.seconds: dict[jb.Bucket, float] = {}

    @property
    def seconds_waited(self) -> float:
        return math.fsum(self.seconds.values())

    @property
    def report(self) -> jb.compile.CompileReport:
        """An empty report, because nothing is compiled ahead of time."""
        return jb.compile.CompileReport(())

    def __call__(self, state: Any, batch: jb.Batch) -> Any:
        if batch.bucket in self.seconds:
            return self._step_fn(state, batch)
        # Time spent on earlier steps must not count as compile time.
        jax.block_until_ready(state)
        start = time.perf_counter()
        result = self._step_fn(state, batch)
        self.seconds[batch.bucket] = time.perf_counter() - start
        return result


def dynamic(
    examples: documents.Examples, limits: Limits, seed: int
) -> Iterator[jb.Batch]:
    """Yields batches of documents in random order, each filled up to the limit."""
    for epoch in itertools.count():
        rows: list[dict[str, np.ndarray]] = []
        for index in np.random.default_rng((seed, epoch)).permutation(len(examples)):
            document = {"tokens": examples[index]["tokens"][: limits.max_len]}
            if _shape([*rows, document], limits).num_tokens > limits.max_tokens:
                yield jb.data.collate_rows(rows, _shape(rows, limits))
                rows = []
            rows.append(document)
        yield jb.data.collate_rows(rows, _shape(rows, limits))


def _shape(rows: list[dict[str, np.ndarray]], limits: Limits) -> jb.Bucket:
    multiple = limits.batch_size_multiple
    return jb.Bucket(
        -(-len(rows) // multiple) * multiple, max(len(row["tokens"]) for row in rows)
    )


def grain_pack(
    examples: documents.Examples, bucket: jb.Bucket, limits: Limits, seed: int
) -> Iterable[jb.Batch]:
    """Yields batches of shuffled documents, packed by Grain's first fit."""

    def truncate(example: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"tokens": example["tokens"][: limits.max_len]}

    shuffled = (
        grain.MapDataset.source(examples).seed(seed).shuffle().repeat().map(truncate)
    )
    packed = grain.experimental.FirstFitPackIterDataset(
        shuffled.to_iter_dataset(),
        length_struct={"tokens": bucket.seq_len},
        num_packing_bins=_PACKING_BINS,
        seed=seed,
    )
    for row in packed.batch(bucket.batch_size, drop_remainder=True):
        yield jb.Batch(
            {"tokens": row["tokens"]},
            {"tokens": row["tokens_segment_ids"]},
            {"tokens": row["tokens_positions"]},
        )
