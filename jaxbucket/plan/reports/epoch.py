"""One epoch of a plan in numbers: padding, tokens, steps, cost, examples lost."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.buckets import GROUPS, BucketPlan, Group
from jaxbucket.base.checks import (
    MAX_LENGTH,
    check_accumulate,
    check_choice,
    check_lengths,
)
from jaxbucket.plan.chunks import chunk_lengths, last_chunks
from jaxbucket.plan.formatting import in_unit, number_table
from jaxbucket.plan.remainder import (
    Remainder,
    RowFlow,
    epoch_cost,
    filler_bucket,
    flow_remainders,
)


@dataclasses.dataclass(frozen=True)
class BucketReport:
    """One bucket over one epoch.

    Attributes:
      batch_size: B, over all devices.
      seq_len: T.
      examples: examples whose shortest bucket this is.
      carried: examples that come up from the bucket below to fill a batch here.
      batches: batches of an epoch, of which a step has one unless it accumulates.
      empty_rows: rows of these batches that hold no example.
      left_over: examples that fill no batch and are left out of an epoch.
      padding: share of positions that are padding where an example is in its own
        bucket; empty rows apart.
      token_share: this bucket's share of the epoch's B * T.
      cost_share: its share of what the epoch costs.
    """

    batch_size: int
    seq_len: int
    examples: int
    carried: int
    batches: int
    empty_rows: int
    left_over: int
    padding: float
    token_share: float
    cost_share: float


@dataclasses.dataclass(frozen=True)
class Report:
    """One epoch of a plan on a set of lengths.

    Attributes:
      buckets: each bucket's part of the epoch.
      steps_per_epoch: optimizer updates that see every example once.
      examples: examples that are trained on.
      real_tokens: their positions, after truncation; the mean over epochs where
        remainders are dropped, which are others in every epoch.
      padded_tokens: B * T summed over the batches.
      padding: 1 - real_tokens / padded_tokens.
      padding_in_rows: the part of it behind the examples' ends.
      padding_in_empty_rows: the part of it in rows without an example.
      left_over_examples: examples left out of an epoch because they fill no batch.
      dropped_examples: examples left out as too long.
      truncated_examples: examples cut as too long.
      truncated_tokens: positions cut off from them.
      epoch_cost: the sum of the steps' costs by the plan.
      cost_unit: the unit of these: "tokens" where the plan has no costs, "s" for
        seconds.
      split_examples: examples split as too long; none if the lengths are of chunks. In
        all other numbers every chunk is an example.
      chunks: the pieces of these examples.
      packed_examples: examples in its rows, where these are packed; in all other
        numbers a row is an example.
      mask_bytes: of the largest boolean mask [B, 1, T, T], over all devices, which
        keeps the examples of a row apart where attention has no other way.
      autocorrelation: of the T of one batch and of the next, from -1 to 1: near 0 in
        a shuffled epoch. None where no order is known, or all have the same T.
    """

    buckets: tuple[BucketReport, ...]
    steps_per_epoch: int
    examples: int
    real_tokens: int
    padded_tokens: int
    padding: float
    padding_in_rows: float
    padding_in_empty_rows: float
    left_over_examples: int
    dropped_examples: int
    truncated_examples: int
    truncated_tokens: int
    epoch_cost: float
    cost_unit: str
    split_examples: int = 0
    chunks: int = 0
    packed_examples: int = 0
    autocorrelation: float | None = None

    @property
    def mask_bytes(self) -> int:
        return max(x.batch_size * x.seq_len**2 for x in self.buckets)

    def with_real_tokens(self, real_tokens: int) -> Report:
        """Returns the same rows with other real tokens in them."""
        less = (self.real_tokens - real_tokens) / max(self.padded_tokens, 1)
        return dataclasses.replace(
            self,
            real_tokens=real_tokens,
            padding=self.padding + less,
            padding_in_rows=self.padding_in_rows + less,
        )

    def to_dict(self) -> dict[str, Any]:
        """Every number, as plain Python."""
        mask = {"mask_bytes": self.mask_bytes} if self.packed_examples else {}
        return dataclasses.asdict(self) | mask

    def to_json(self) -> str:
        """Every number, as one JSON object."""
        return json.dumps(self.to_dict())

    def __rich__(self) -> Any:
        """The report as a `rich` table, for a terminal."""
        names = ["B", "T", "examples", "carried in", "batches", "empty rows", "padding"]
        names.append("tokens")
        if self.cost_unit != "tokens":
            names.append("time" if self.cost_unit == "s" else self.cost_unit)
        rows = (
            (
                *(str(n) for n in (b.batch_size, b.seq_len, b.examples, b.carried)),
                *(str(b.batches), str(b.empty_rows)),
                *(f"{b.padding:.1%}", f"{b.token_share:.1%}", f"{b.cost_share:.1%}"),
            )
            for b in self.buckets
        )
        return number_table(names, (row[: len(names)] for row in rows), self.summary)

    @property
    def summary(self) -> str:
        """The totals in a few sentences."""
        lines = [
            f"{self.steps_per_epoch} steps per epoch, {self.real_tokens} real tokens "
            f"in {self.padded_tokens}.",
            f"{self.padding:.1%} padding: {self.padding_in_rows:.1%} in rows, "
            f"{self.padding_in_empty_rows:.1%} in empty rows.",
        ]
        if self.cost_unit != "tokens":
            cost = in_unit(self.epoch_cost, self.cost_unit)
            lines.append(f"Predicted epoch: {cost}.")
        if self.left_over_examples:
            lines.append(
                f"{self.left_over_examples} examples fill no batch: left out of an "
                "epoch."
            )
        if self.dropped_examples:
            lines.append(f"{self.dropped_examples} examples are too long: dropped.")
        if self.truncated_examples:
            lines.append(
                f"{self.truncated_examples} examples are too long: cut by "
                f"{self.truncated_tokens} tokens."
            )
        if self.split_examples:
            lines.append(
                f"{self.split_examples} examples are too long: split into "
                f"{self.chunks} chunks."
            )
        if self.packed_examples:
            lines.append(
                f"{self.packed_examples} examples are packed in {self.examples} rows; "
                f"a mask [B, 1, T, T] takes up to {self.mask_bytes / 2**20:.1f} MiB."
            )
        if self.autocorrelation is not None:
            lines.append(
                f"Autocorrelation of T from batch to batch: {self.autocorrelation:.3f}."
            )
        return "\n".join(lines)


def report(
    plan: BucketPlan,
    lengths: ArrayLike,
    *,
    remainder: Remainder = "cheapest",
    accumulate: int = 1,
    group: Group = "same",
) -> Report:
    """Returns the numbers of one epoch of these lengths under a plan, exactly.

    Where remainders are dropped, real tokens are the mean over all choices of them.

    Example:
      >>> from jaxbucket import Bucket
      >>> plan = BucketPlan((Bucket(4, 8), Bucket(2, 16)), max_tokens=32)
      >>> print(report(plan, [8, 8, 8, 8, 6, 10]).summary)
      2 steps per epoch, 48 real tokens in 64.
      25.0% padding: 25.0% in rows, 0.0% in empty rows.

    Args:
      plan: the shapes.
      lengths: `[N]` integers, one per example, for which the plan was made or others;
        under `overlong="split"` one per example or per chunk.
      remainder: what becomes of examples that fill no batch: "cheapest" moves them to
        longer buckets where that costs less, "promote" always, "pad" never, and "drop"
        leaves them out.
      accumulate: micro-batches of a step.
      group: whether the micro-batches of a step have the "same" bucket or are "mixed".

    Raises:
      ValueError: for lengths the plan refuses, an unknown remainder or group, or
        `accumulate` that is not positive.
    """
    check_choice("group", group, GROUPS)
    accumulate = check_accumulate(accumulate)
    lengths = check_lengths(lengths)
    # Full chunks are counted and not made: there may be more than memory holds.
    rows, full = lengths, 0
    if plan.overlong == "split":
        rows, full = last_chunks(lengths, plan.max_seq_len)
    rows = plan.check(rows)
    counts, tokens = _by_bucket(plan, rows)
    counts[-1] += full
    tokens[-1] += full * plan.max_seq_len
    # Batches of the same bucket in a step are filled together.
    together = accumulate if group == "same" else 1
    flow = flow_remainders(counts, plan.rows_together(together), plan.costs, remainder)
    steps = -(-flow.num_batches * together // accumulate)
    batches = flow.batches * together
    # Empty batches make the last step full.
    filler = plan.buckets.index(filler_bucket(plan))
    batches[filler] += steps * accumulate - batches.sum()
    shares = 1 - flow.dropped / np.maximum(counts, 1)
    real = round(float((tokens * shares).sum()))
    padded = int(epoch_cost(batches, plan.batch_sizes * plan.boundaries))
    in_rows = int(epoch_cost(flow.rows, plan.boundaries))
    over = rows[rows > _longest(plan)]
    truncated = over if plan.overlong == "truncate" else over[:0]
    split = int(np.count_nonzero(lengths > _longest(plan))) if full else 0
    return Report(
        buckets=_bucket_reports(plan, flow, batches, tokens),
        steps_per_epoch=steps,
        examples=int(counts.sum() - flow.dropped.sum()),
        real_tokens=real,
        padded_tokens=padded,
        padding=1 - real / max(padded, 1),
        padding_in_rows=(in_rows - real) / max(padded, 1),
        padding_in_empty_rows=(padded - in_rows) / max(padded, 1),
        left_over_examples=int(flow.dropped.sum()),
        dropped_examples=len(over) - len(truncated),
        truncated_examples=len(truncated),
        truncated_tokens=int((truncated - _longest(plan)).sum()),
        epoch_cost=epoch_cost(batches, plan.costs),
        cost_unit=plan.cost_unit,
        split_examples=split,
        chunks=split + full,
    )


def row_lengths(plan: BucketPlan, lengths: np.ndarray) -> np.ndarray:
    """Returns the lengths of what is put into rows: of chunks, if the plan splits."""
    if plan.overlong != "split":
        return lengths
    return chunk_lengths(lengths, plan.max_seq_len)


def _by_bucket(plan: BucketPlan, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`[K]` examples whose shortest bucket it is, `[K]` the tokens they have."""
    # Examples that are dropped are of bucket -1.
    index = plan.assign(lengths) + 1
    used = np.minimum(lengths, _longest(plan))
    counts = np.bincount(index, minlength=len(plan) + 1)
    tokens = np.bincount(index, weights=used, minlength=len(plan) + 1)
    return counts[1:], tokens[1:]


def _longest(plan: BucketPlan) -> int:
    """T of the last bucket, as a number that compares with lengths of 32 bits."""
    return min(plan.max_seq_len, MAX_LENGTH)


def _bucket_reports(
    plan: BucketPlan, flow: RowFlow, batches: np.ndarray, tokens: np.ndarray
) -> tuple[BucketReport, ...]:
    all_tokens = max(epoch_cost(batches, plan.batch_sizes * plan.boundaries), 1)
    all_costs = epoch_cost(batches, plan.costs) or 1
    # As Python's integers, which have no end.
    columns = (flow.counts, flow.carried, flow.rows, flow.dropped)
    columns = (column.tolist() for column in (*columns, batches, tokens, plan.costs))
    return tuple(
        BucketReport(
            batch_size=bucket.batch_size,
            seq_len=bucket.seq_len,
            examples=examples,
            carried=carried,
            batches=number,
            empty_rows=number * bucket.batch_size - rows,
            left_over=left_over,
            padding=_free_share(examples * bucket.seq_len, real),
            token_share=number * bucket.num_tokens / all_tokens,
            cost_share=number * cost / all_costs,
        )
        for bucket, examples, carried, rows, left_over, number, real, cost in zip(
            plan.buckets, *columns, strict=True
        )
    )


def _free_share(positions: int, tokens: float) -> float:
    return (positions - tokens) / max(positions, 1)


def lag1_autocorrelation(values: np.ndarray) -> float | None:
    """Returns how much a value says about the next, from -1 to 1; None if all agree.

    Box and Jenkins, "Time Series Analysis", 1970: the products of the deviations of
    neighbours from the mean, over the squared deviations, both summed.

    Example:
      >>> lag1_autocorrelation(np.array([1, 2, 1, 2]))
      -0.75
    """
    deviations = values - values.mean()
    variance = float((deviations**2).sum())
    if not variance:
        return None
    return float((deviations[1:] * deviations[:-1]).sum()) / variance
