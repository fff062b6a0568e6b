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
    steps = _steps(counts, seconds, max(num_points, _NUM_STEPS))
    waits = _load_seconds(steps, cluster, slowest, deviations)
    steps["seconds"] = steps["seconds"] * slowest.mean() + waits
    parts = dict.fromkeys(PARTS, 0.0)
    parts["steps"] = compute * cluster.mean_factor
    parts["waiting"] = float(compute * (slowest.mean() - cluster.mean_factor))
    parts["data"] = float(waits.mean() * counts.steps_per_epoch)
    parts["compile"] = float(cluster.compile_seconds * np.count_nonzero(batches))
    work = parts["steps"] + parts["waiting"] + parts["data"]
    total, interval = parts["compile"] + work, cluster.checkpoint_steps
    ends = (total, total)
    if cluster.hours_between_faults is not None or interval is not None:
        interval, ends = _add_faults(parts, work, report.steps_per_epoch, cluster)
    chosen = np.linspace(0, len(waits), min(num_points, len(waits)), endpoint=False)
    steps = {name: values[chosen.astype(int)] for name, values in steps.items()}
    if learning_rate is not None:
        steps["learning_rate"] = _learning_rates(learning_rate, counts, steps)
    del steps["rows"], steps["before"]
    balance = _balance(counts, lengths, batches, cluster.num_devices, rng)
    return SimulatedEpoch(counts.plan, report, parts, ends, interval, balance, steps)


def _load_seconds(
    steps: dict[str, np.ndarray],
    cluster: Cluster,
    slowest: np.ndarray,
    deviations: np.ndarray,
) -> np.ndarray:
    """Returns the mean seconds for which steps wait for their batch, `[n]`.

    The batch of a step is loaded during the step before it, which may be short. The
    times of its rows are independent, so their sum is about normally distributed.

    Args:
      steps: what the steps train on, and the `before` seconds of the step before them.
      cluster: the machines.
      slowest, deviations: the draws of `Cluster.slowest`.
    """
    rows = steps["rows"] / cluster.num_hosts
    times = np.asarray(cluster.row_seconds, np.float64)
    mean, deviation = times.mean(), times.std()
    # Few steps differ, because a plan has few buckets.
    kinds = np.stack([rows, steps["before"]], axis=1)
    kinds, places = np.unique(kinds, axis=0, return_inverse=True)
    waits = [
        np.maximum(
            number * mean + np.sqrt(number) * deviation * deviations - before * slowest,
            0,
        ).mean()
        for number, before in kinds
    ]
    return np.array(waits)[places.reshape(-1)]


def _add_faults(
    parts: dict[str, float], work: float, num_steps: int, cluster: Cluster
) -> tuple[int, tuple[float, float]]:
    """Adds the parts of checkpoints and faults.

    Returns:
      The steps between two checkpoints, and the range of the seconds of an epoch.
    """
    step = work / num_steps
    costs = (cluster.checkpoint_seconds, cluster.restart_seconds)
    gaps, interval = cluster.fault_gaps, cluster.checkpoint_steps
    interval = interval or best_interval(work, step, *costs, gaps)
    runs = replay(work, interval * step, *costs, gaps)
    if not np.isfinite(runs.overhead).all():
        raise ValueError(
            f"`checkpoint_steps={interval}` take {interval * step:,.0f} s, and no such "
            "time passes without a fault. Write checkpoints more often, on fewer "
            "hosts, or with more `hours_between_faults`."
        )
    for name in ("checkpoints", "lost", "restarts"):
        parts[name] = float(getattr(runs, name).mean())
    ends = work + parts["compile"] + np.quantile(runs.overhead, [0.05, 0.95])
    return interval, (float(ends[0]), float(ends[1]))


def _steps(
    counts: BatchCounts, seconds: np.ndarray, num_points: int
) -> dict[str, np.ndarray]:
    """Returns what some steps, about equally distant, train on.

    Args:
      counts: the numbers of all steps.
      seconds: `[K]` seconds of a batch of each bucket on the mean host.
      num_points: the number of steps.

    Returns:
      Arrays by name: the "step"; its "examples", "rows" (empty ones included),
      "positions", real "tokens" and "seconds"; and those of the step "before".
    """
    total, plan = counts.steps_per_epoch, counts.plan
    number = min(num_points, total)
    places = {bucket: place for place, bucket in enumerate(plan.buckets)}
    means, rows = _tokens_per_row(counts), []
    for place in range(number):
        # Anywhere in its part of the epoch, because buckets may come periodically.
        step = place * total // number + mix(place) % (total // number)
        parts = counts.micro_batches(step)
        index = [places[bucket] for bucket, _ in parts]
        filled = np.array([examples for _, examples in parts])
        earlier = [places[x] for x, _ in counts.micro_batches(step - 1)] if step else []
        rows.append(
            {
                "step": step,
                "examples": int(filled.sum()),
                "rows": int(plan.batch_sizes[index].sum()),
                "positions": sum(bucket.num_tokens for bucket, _ in parts),
                "tokens": float(filled @ means[index]),
                "seconds": float(seconds[index].sum()),
                "before": float(seconds[earlier].sum()),
            }
        )
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def _learning_rates(
    schedule: Any, counts: BatchCounts, steps: dict[str, np.ndarray]
) -> np.ndarray:
    """Returns the learning rate of each of some steps, `[n]`."""
    from jaxbucket.optim.schedules import learning_rate_at

    report, total = counts.report, counts.steps_per_epoch
    rows = zip(*(steps[x] for x in ("step", "examples", "tokens", "rows")), strict=True)
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
        for step, examples, tokens, number in rows
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
