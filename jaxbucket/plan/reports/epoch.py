"""Numbers about a plan and about a run: padding, tokens, steps, time, examples lost."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.buckets import GROUPS, Bucket, BucketPlan, Group
from jaxbucket.base.checks import (
    MAX_LENGTH,
    check_accumulate,
    check_choice,
    check_lengths,
)
from jaxbucket.plan.chunks import chunk_lengths, last_chunks
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
      buckets: the same, bucket by bucket.
      steps_per_epoch: optimizer updates that see every example once.
      examples: examples that are trained on.
      real_tokens: their positions, after truncation; where remainders are dropped,
        other ones in every epoch, the mean over epochs.
      padded_tokens: B * T summed over the batches.
      padding: 1 - real_tokens / padded_tokens.
      padding_in_rows: the part of it behind the examples' ends.
      padding_in_empty_rows: the part of it in rows without an example.
      left_over_examples: examples left out of an epoch, for they fill no batch.
      dropped_examples: examples left out as too long.
      truncated_examples: examples cut as too long.
      truncated_tokens: positions cut off from them.
      epoch_cost: what the plan says that the steps cost, summed.
      cost_unit: in what: "tokens", where the plan does not say, "s" for seconds.
      split_examples: examples split as too long; of lengths that are those of chunks
        already, none. In all other numbers every chunk is an example.
      chunks: the pieces that they were split into.
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
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, caption=self.summary, caption_justify="left")
        costs = [] if self.cost_unit == "tokens" else [self.cost_unit]
        for name in (
            *("B", "T", "examples", "carried in", "batches"),
            *("empty rows", "padding", "tokens"),
            *("time" if unit == "s" else unit for unit in costs),
        ):
            table.add_column(name, justify="right")
        for b in self.buckets:
            table.add_row(
                *(str(n) for n in (b.batch_size, b.seq_len, b.examples, b.carried)),
                *(str(b.batches), str(b.empty_rows)),
                *(f"{b.padding:.1%}", f"{b.token_share:.1%}"),
                *([f"{b.cost_share:.1%}"] if costs else []),
            )
        return table

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


def in_unit(cost: float, unit: str) -> str:
    """Returns a cost as a person reads it.

    Example:
      >>> in_unit(1234.5, "s"), in_unit(2.5e15, "FLOP"), in_unit(90_000, "tokens")
      ('1,234.5 s', '2.5e+15 FLOP', '90,000 tokens')
    """
    return f"{number_in_unit(cost, unit)} {unit}"


def number_in_unit(cost: float, unit: str) -> str:
    """Returns the number of `in_unit`, without the unit."""
    if unit == "tokens" and cost < 1e11:
        return f"{cost:,.0f}"
    return f"{cost:,.1f}" if 10 <= cost < 1e9 else f"{cost:.3g}"


def report(
    plan: BucketPlan,
    lengths: ArrayLike,
    *,
    remainder: Remainder = "cheapest",
    accumulate: int = 1,
    group: Group = "same",
) -> Report:
    """Returns what one epoch of these lengths costs under a plan, exactly.

    Where remainders are dropped, real tokens are the mean over all choices of them.

    Example:
      >>> from jaxbucket import Bucket
      >>> plan = BucketPlan((Bucket(4, 8), Bucket(2, 16)), max_tokens=32)
      >>> print(report(plan, [8, 8, 8, 8, 6, 10]).summary)
      2 steps per epoch, 48 real tokens in 64.
      25.0% padding: 25.0% in rows, 0.0% in empty rows.

    Args:
      plan: the shapes.
      lengths: `[N]` integers, those the plan was made for or others; under
        `overlong="split"` of examples or of chunks.
      remainder: as in `BatchSchedule`, and so are the others.
      accumulate: micro-batches of a step.
      group: whether they have the "same" bucket or are "mixed".

    Raises:
      ValueError: for lengths the plan refuses, an unknown remainder or group, or
        `accumulate` that is not positive.
    """
    check_choice("group", group, GROUPS)
    accumulate = check_accumulate(accumulate)
    given = check_lengths(lengths)
    lengths, full = given, 0
    if plan.overlong == "split":
        # Counted, and not made: there may be more than there is memory for.
        lengths, full = last_chunks(given, plan.max_seq_len)
    lengths = plan.check(lengths)
    counts, own_tokens = _by_bucket(plan, lengths)
    counts[-1] += full
    own_tokens[-1] += full * plan.max_seq_len
    # Batches of the same bucket in a step are filled together.
    together = accumulate if group == "same" else 1
    flow = flow_remainders(counts, plan.rows_together(together), plan.costs, remainder)
    steps = -(-flow.num_batches * together // accumulate)
    batches = flow.batches * together
    # Those that make the last step full.
    filler = plan.buckets.index(filler_bucket(plan))
    batches[filler] += steps * accumulate - batches.sum()
    shares = 1 - flow.dropped / np.maximum(counts, 1)
    real = round(float((own_tokens * shares).sum()))
    padded = int(epoch_cost(batches, plan.batch_sizes * plan.boundaries))
    in_rows = int(epoch_cost(flow.rows, plan.boundaries))
    over = lengths[lengths > _longest(plan)]
    truncated = over if plan.overlong == "truncate" else over[:0]
    split = np.count_nonzero(given > _longest(plan)) if full else 0
    return Report(
        buckets=_bucket_reports(plan, flow, batches, own_tokens),
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
        split_examples=int(split),
        chunks=int(split) + full,
    )


def row_lengths(plan: BucketPlan, lengths: np.ndarray) -> np.ndarray:
    """Returns the lengths of what is put into rows: of chunks, if the plan splits."""
    if plan.overlong != "split":
        return lengths
    return chunk_lengths(lengths, plan.max_seq_len)


def _by_bucket(plan: BucketPlan, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`[K]` examples whose shortest bucket it is, `[K]` the tokens they have."""
    # Those that are dropped are of bucket -1.
    index = plan.assign(lengths) + 1
    used = np.minimum(lengths, _longest(plan))
    counts = np.bincount(index, minlength=len(plan) + 1)
    tokens = np.bincount(index, weights=used, minlength=len(plan) + 1)
    return counts[1:], tokens[1:]


def _longest(plan: BucketPlan) -> int:
    """What a row takes, as a number that lengths of 32 bits can be compared with."""
    return min(plan.max_seq_len, MAX_LENGTH)


def _bucket_reports(
    plan: BucketPlan, flow: RowFlow, batches: np.ndarray, own_tokens: np.ndarray
) -> tuple[BucketReport, ...]:
    # As Python's own numbers, because they may be more than 64 bits hold.
    columns = (batches, flow.counts, flow.carried, flow.rows, flow.dropped)
    rows = zip(
        plan.buckets,
        *(column.tolist() for column in (*columns, own_tokens, plan.costs)),
        strict=True,
    )
    all_tokens = max(epoch_cost(batches, plan.batch_sizes * plan.boundaries), 1)
    all_costs = epoch_cost(batches, plan.costs) or 1
    return tuple(
        BucketReport(
            batch_size=bucket.batch_size,
            seq_len=bucket.seq_len,
            examples=examples,
            carried=carried,
            batches=number,
            empty_rows=number * bucket.batch_size - in_rows,
            left_over=left_over,
            padding=_share(examples * bucket.seq_len, tokens),
            token_share=number * bucket.num_tokens / all_tokens,
            cost_share=number * cost / all_costs,
        )
        for bucket, number, examples, carried, in_rows, left_over, tokens, cost in rows
    )


def _share(places: int, tokens: float) -> float:
    """Of some places, the share that holds no token."""
    return float(places - tokens) / max(places, 1)


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


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """One step of a run, as plain numbers.

    Attributes:
      step: its number, from 0.
      bucket: the shape (B, T).
      seconds: how long it took.
      loss: the mean over its real tokens.
      real_tokens: positions that were no padding.
      learning_rate: the one in force, scaled by the batch's size.
    """

    step: int
    bucket: Bucket
    seconds: float
    loss: float
    real_tokens: int
    learning_rate: float


@dataclasses.dataclass(frozen=True)
class BucketUse:
    """What one bucket had of a run.

    Attributes:
      bucket: the shape (B, T).
      steps: its steps.
      seconds: their time.
      seconds_per_step: the median of their times.
      loss: the mean over its real tokens; NaN where it had none.
      real_tokens: positions that were no padding.
      padding: share of positions that were padding.
    """

    bucket: Bucket
    steps: int
    seconds: float
    seconds_per_step: float
    loss: float
    real_tokens: int
    padding: float

    @property
    def seconds_per_token(self) -> float:
        """Median step time over B * T, padding counted: what a position costs."""
        return self.seconds_per_step / self.bucket.num_tokens

    def to_dict(self) -> dict[str, Any]:
        """Every number, as plain Python."""
        fields = dataclasses.asdict(self)
        fields["bucket"] = [self.bucket.batch_size, self.bucket.seq_len]
        fields["loss"] = None if np.isnan(self.loss) else self.loss
        return {**fields, "seconds_per_token": self.seconds_per_token}


def bucket_uses(records: Iterable[StepRecord]) -> list[BucketUse]:
    """Returns what each bucket had of the steps of a run, the shortest bucket first.

    Example:
      >>> from jaxbucket import Bucket
      >>> short, long = Bucket(4, 8), Bucket(2, 16)
      >>> records = [
      ...     StepRecord(0, long, 0.3, 2.5, 24, 1e-3),
      ...     StepRecord(1, short, 0.1, 2.4, 32, 1e-3),
      ...     StepRecord(2, long, 0.2, 2.3, 24, 1e-3),
      ... ]
      >>> for use in bucket_uses(records):
      ...     print(use.bucket, use.steps, round(use.loss, 3), use.padding)
      [4, 8] 1 2.4 0.0
      [2, 16] 2 2.4 0.25

    What their steps took is what a plan by time is made of:
    `StepTime.fit({use.bucket: use.seconds_per_step for use in bucket_uses(records)})`.
    """
    by_bucket: dict[Bucket, list[StepRecord]] = {}
    for record in records:
        by_bucket.setdefault(record.bucket, []).append(record)
    return [
        _use_of(bucket, own)
        for bucket, own in sorted(
            by_bucket.items(), key=lambda item: (item[0].seq_len, item[0].batch_size)
        )
    ]


def _use_of(bucket: Bucket, records: list[StepRecord]) -> BucketUse:
    real_tokens = sum(record.real_tokens for record in records)
    loss_sum = sum(record.loss * record.real_tokens for record in records)
    return BucketUse(
        bucket=bucket,
        steps=len(records),
        seconds=sum(record.seconds for record in records),
        seconds_per_step=float(np.median([record.seconds for record in records])),
        loss=loss_sum / real_tokens if real_tokens else np.nan,
        real_tokens=real_tokens,
        padding=1 - real_tokens / (bucket.num_tokens * len(records)),
    )
