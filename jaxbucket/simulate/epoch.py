"""Simulates an epoch: what its parts take, and what every step trains on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.base.checks import check_positive
from jaxbucket.base.length_counts import LengthCounts
from jaxbucket.base.permutation import mix
from jaxbucket.base.sizes import Counted
from jaxbucket.plan.tally import lengths_and_counts
from jaxbucket.schedule.batch_counts import BatchCounts
from jaxbucket.simulate.cluster import Cluster
from jaxbucket.simulate.faults import best_interval, replay
from jaxbucket.simulate.simulation import PARTS, SimulatedEpoch, Simulation

# Draws of a random time, whose mean is used.
_DRAWS = 20_000
# Steps from which the times of an epoch are computed.
_NUM_STEPS = 2000
# Rows that are drawn to compare devices.
_MAX_ROWS = 1 << 20


def simulate(
    plans: BucketPlan | Mapping[str, BucketPlan],
    lengths: Counted,
    cluster: Cluster,
    *,
    learning_rate: Any = None,
    num_points: int = 200,
    **options: Any,
) -> Simulation:
    """Predicts the first epoch of plans on a cluster, from a histogram of lengths.

    Buckets and numbers of examples of all steps are those of a `BatchSchedule`. Times
    are means over the draws of the cluster's distributions, which are independent for
    each host and step. In reality, a host may be slow for a long time.

    Example:
      >>> import jaxbucket as jb
      >>> lengths = jb.LengthCounts({128: 10**9, 1024: 10**8})
      >>> plan = jb.plan_buckets(lengths, max_tokens=2**24, batch_size_multiple=4096)
      >>> cluster = Cluster(
      ...     num_hosts=1024,
      ...     devices_per_host=4,
      ...     step_seconds=lambda batch_size, seq_len: batch_size * seq_len / 2**23,
      ...     skew=0.02,
      ... )
      >>> epoch = simulate(plan, lengths, cluster)["plan"]
      >>> epoch.report.steps_per_epoch, f"{epoch.share('waiting'):.1%}"
      (13734, '6.3%')

    Args:
      plans: a plan; or name -> plan, to compare several.
      lengths: `LengthCounts`, or lengths as for `report`.
      cluster: the machines, and what takes how long.
      learning_rate: a number, a schedule of optax, or the result of `scale_schedule` or
        `schedule_by_work`, to have the learning rate of steps.
      num_points: the number of steps for which numbers are returned.
      **options: `seed`, `order`, `remainder`, `accumulate` and `group` of the schedule,
        as for `BatchCounts`.

    Raises:
      ValueError: if a plan is for packed rows, `BatchCounts` refuses an option, no step
        time is known, or faults come before any checkpoint is complete.
    """
    named = plans if isinstance(plans, Mapping) else {"plan": plans}
    num_points = check_positive("num_points", num_points)
    if not any(len(x.sequences) for x in named.values()):
        lengths = LengthCounts.of(lengths)
    epochs = {}
    for name, plan in named.items():
        counts = BatchCounts(plan, lengths, **options)
        epochs[name] = _simulated(counts, lengths, cluster, learning_rate, num_points)
    return Simulation(epochs, cluster)


def _simulated(
    counts: BatchCounts,
    lengths: Counted,
    cluster: Cluster,
    learning_rate: Any,
    num_points: int,
) -> SimulatedEpoch:
    seconds, report = cluster.seconds(counts.plan), counts.report
    batches = np.array([x.batches for x in report.buckets], np.float64)
    rng = np.random.default_rng(0)
    slowest, deviations = cluster.slowest(rng, _DRAWS)
    compute = float(batches @ seconds)
    steps, rows, before = _steps(counts, seconds, max(num_points, _NUM_STEPS))
    waits = _load_seconds(rows, before, cluster, slowest, deviations)
    steps["seconds"] = steps["seconds"] * slowest.mean() + waits
    parts = dict.fromkeys(PARTS, 0.0)
    parts["steps"] = compute * cluster.mean_factor
    parts["waiting"] = float(compute * (slowest.mean() - cluster.mean_factor))
    parts["data"] = float(waits.mean() * counts.steps_per_epoch)
    work = sum(parts.values())
    parts["compile"] = float(cluster.compile_seconds * np.count_nonzero(batches))
    interval, overhead, without_fault = cluster.checkpoint_steps, np.zeros(1), 1.0
    if cluster.hours_between_faults is not None or interval is not None:
        interval, costs = _replayed(work, report.steps_per_epoch, cluster)
        means = costs.mean(axis=1).tolist()
        parts |= zip(("checkpoints", "lost", "restarts"), means, strict=True)
        overhead = costs.sum(axis=0)
        without_fault = float(np.mean(costs[1:].sum(axis=0) == 0))
    ends = work + parts["compile"] + np.quantile(overhead, [0.05, 0.95])
    chosen = np.linspace(0, len(waits), min(num_points, len(waits)), endpoint=False)
    chosen = chosen.astype(int)
    steps = {name: values[chosen] for name, values in steps.items()}
    if learning_rate is not None:
        rates = _learning_rates(learning_rate, counts, steps, rows[chosen])
        steps["learning_rate"] = rates
    balance = _balance(counts, lengths, batches, cluster.num_devices, rng)
    return SimulatedEpoch(
        plan=counts.plan,
        report=report,
        parts=parts,
        range=tuple(ends.tolist()),
        without_fault=without_fault,
        checkpoint_steps=interval,
        balance=balance,
        steps=steps,
    )


def _load_seconds(
    rows: np.ndarray,
    before: np.ndarray,
    cluster: Cluster,
    slowest: np.ndarray,
    deviations: np.ndarray,
) -> np.ndarray:
    """Returns the mean seconds for which steps wait for their batch, `[n]`.

    The batch of a step is loaded during the step before it, which may be short. The
    times of its rows are independent, so their sum is about normally distributed.

    Args:
      rows: `[n]`, the rows of each step on all hosts.
      before: `[n]` seconds of the step before on the mean host.
      cluster: the machines.
      slowest, deviations: the draws of `Cluster.slowest`.
    """
    times = np.asarray(cluster.row_seconds, np.float64)
    mean, deviation = times.mean(), times.std()
    # Few steps differ, because a plan has few buckets.
    kinds = np.stack([rows / cluster.num_hosts, before], axis=1)
    kinds, places = np.unique(kinds, axis=0, return_inverse=True)
    waits = [
        np.maximum(
            number * mean + np.sqrt(number) * deviation * deviations - before * slowest,
            0,
        ).mean()
        for number, before in kinds
    ]
    return np.array(waits)[places.reshape(-1)]


def _replayed(work: float, num_steps: int, cluster: Cluster) -> tuple[int, np.ndarray]:
    """Returns the steps between two checkpoints, and what `replay` returns for them."""
    step, interval = work / num_steps, cluster.checkpoint_steps
    interval = interval or best_interval(work, step, cluster)
    costs = replay(work, interval * step, cluster)
    if not np.isfinite(costs).all():
        raise ValueError(
            f"`checkpoint_steps={interval}` take {interval * step:,.0f} s, and no such "
            "time passes without a fault. Lower it or `num_hosts`, or pass more "
            "`hours_between_faults`."
        )
    return interval, costs


def _steps(
    counts: BatchCounts, seconds: np.ndarray, num_points: int
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Returns what some steps, about equally distant, train on.

    Args:
      counts: the numbers of all steps.
      seconds: `[K]` seconds of a batch of each bucket on the mean host.
      num_points: the number of steps.

    Returns:
      Arrays by name: the "step"; its "examples", "positions", real "tokens" and
      "seconds". Then its rows, empty ones included, and the seconds of the step before.
    """
    total, plan = counts.steps_per_epoch, counts.plan
    number = min(num_points, total)
    # Anywhere in its part of the epoch, because buckets may come periodically.
    offsets = (mix(place) % (total // number) for place in range(number))
    chosen = [place * total // number + x for place, x in enumerate(offsets)]
    batches, examples = _batches_of(counts, chosen)
    earlier, _ = _batches_of(counts, [step - 1 for step in chosen])
    steps = {
        "step": np.array(chosen),
        "examples": examples.sum(axis=1),
        "positions": batches @ (plan.batch_sizes * plan.tokens_per_row),
        "tokens": examples @ _tokens_per_row(counts),
        "seconds": batches @ seconds,
    }
    return steps, batches @ plan.batch_sizes, earlier @ seconds


def _batches_of(counts: BatchCounts, steps: list[int]) -> np.ndarray:
    """Returns the batches and the examples of each bucket in some steps, `[2, n, K]`.

    Step -1 has none.
    """
    numbers = np.zeros((2, len(steps), len(counts.plan)), np.int64)
    places = {bucket: place for place, bucket in enumerate(counts.plan.buckets)}
    for row, step in enumerate(steps):
        for bucket, examples in counts.micro_batches(step) if step >= 0 else ():
            numbers[0, row, places[bucket]] += 1
            numbers[1, row, places[bucket]] += examples
    return numbers


def _learning_rates(
    schedule: Any, counts: BatchCounts, steps: dict[str, np.ndarray], rows: np.ndarray
) -> np.ndarray:
    """Returns the learning rate of each of some steps, `[n]`."""
    from jaxbucket.optim.schedules import learning_rate_at

    report, total = counts.report, counts.steps_per_epoch
    columns = (steps["step"], steps["examples"], steps["tokens"], rows)
    rates = [
        learning_rate_at(
            schedule,
            int(step),
            examples_before=round(step * report.examples / total),
            tokens_before=round(step * report.real_tokens / total),
            num_examples=examples,
            num_tokens=tokens,
            num_rows=number,
        )
        for step, examples, tokens, number in zip(*columns, strict=True)
    ]
    return np.array(rates)


def _tokens_per_row(counts: BatchCounts) -> np.ndarray:
    """Returns the mean tokens of the rows of each bucket, `[K]`.

    Its own examples and those that are promoted to it are in random rows.
    """
    flow, tokens = counts.batches.flow, counts.tally.tokens.sum(axis=1).astype(float)
    means = np.zeros(len(tokens))
    for k, target in enumerate(flow.targets.tolist()):
        means[k] = tokens[k] / max(flow.counts[k] + flow.carried[k], 1)
        if target >= 0:
            tokens[target] += flow.promoted[k] * means[k]
    return means


def _balance(
    counts: BatchCounts,
    lengths: Counted,
    batches: np.ndarray,
    num_devices: int,
    rng: np.random.Generator,
) -> float | None:
    """Returns the most real tokens of a device, relative to the mean device."""
    plan = counts.plan
    if plan.sequences or (plan.batch_sizes % num_devices).any():
        return None
    ((rows, numbers),) = lengths_and_counts(plan, lengths)
    index, kept = plan.assign(rows), plan.truncated(rows)
    most, total = 0.0, 0.0
    for k, batch_size in enumerate(plan.batch_sizes.tolist()):
        own = np.where(index == k, numbers, 0)
        if not batches[k] or not own.any() or batch_size > _MAX_ROWS:
            continue
        drawn = rng.choice(kept, batch_size, p=own / own.sum())
        tokens = drawn.reshape(num_devices, -1).sum(axis=1)
        most += batches[k] * tokens.max()
        total += batches[k] * tokens.mean()
    return float(most / total) if total else None
