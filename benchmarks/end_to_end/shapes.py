"""The shapes of a run: planned by tokens, or by the time that steps take here.

Times differ from one measurement to the next. A plan by time is therefore saved beside
the checkpoints, as `plan.json`, and a resumed run has the same shapes.
"""

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import policies
from etils import epath
from example import transformer
from options import SEQ_LEN_MULTIPLE

import jaxbucket as jb
from jaxbucket.plan.costs import CostFn
from jaxbucket.plan.curve import CurvePoint
from jaxbucket.plan.reports.run import StepRecord

FILE = "plan.json"
# Shapes of the held-out documents, if the number of shapes is left open.
_HELD_OUT_BUCKETS = 8
# The number of epochs depends on the plan, and the plan on it. They agree soon.
_MOST_ROUNDS = 8

Measure = Callable[[list[jb.Bucket]], jb.train.Calibration]


@dataclasses.dataclass(frozen=True)
class Planned:
    """A plan, and how it was made.

    Attributes:
      plan: the shapes.
      by: the options that it was made by. Empty for a plan by tokens, which is quickly
        made again.
      words: what was measured, what was chosen, and why.
      seconds: the time that measuring took.
      measured: every number that was measured.
      packed: whether rows have several documents.
      is_kept: whether the plan was read from the folder of the run.
    """

    plan: jb.BucketPlan
    by: dict[str, Any] = dataclasses.field(default_factory=dict)
    words: str = ""
    seconds: float = 0.0
    measured: dict[str, Any] = dataclasses.field(default_factory=dict)
    packed: bool = False
    is_kept: bool = False

    def to_json(self) -> str:
        """Returns a plan that `jaxbucket report` reads, with how it was made."""
        fields = {name: getattr(self, name) for name in _BESIDE}
        return json.dumps({**json.loads(self.plan.to_json()), "planned": fields})

    @classmethod
    def from_json(cls, text: str) -> "Planned":
        plan = jb.BucketPlan.from_json(text)
        fields = json.loads(text).get("planned")
        if isinstance(fields, dict):
            # Plans from before rows could be packed lack the field.
            fields = {"packed": False, **fields}
        if not isinstance(fields, dict) or fields.keys() != _BESIDE:
            raise ValueError("The plan does not have the options that it was made by.")
        return cls(plan, **fields)

    def keep(self, folder: str) -> None:
        """Writes the plan beside the checkpoints, as a whole or not at all."""
        if self.by and not self.is_kept:
            path = epath.Path(folder) / FILE
            part = path.with_name(f"{FILE}.part")
            part.write_text(self.to_json())
            part.replace(path)


_BESIDE = {field.name for field in dataclasses.fields(Planned)} - {"plan", "is_kept"}


def limits_of(limits: policies.Limits) -> jb.Limits:
    return jb.Limits(
        max_tokens=limits.max_tokens,
        batch_size_multiple=limits.batch_size_multiple,
        seq_len_multiple=SEQ_LEN_MULTIPLE,
        max_seq_len=limits.max_len,
        overlong="truncate",
    )


def plan(
    lengths: np.ndarray, limits: jb.Limits, num_buckets: int, boundaries: Any
) -> jb.BucketPlan:
    fields = {f.name: getattr(limits, f.name) for f in dataclasses.fields(limits)}
    return jb.plan_buckets(
        lengths, num_buckets=num_buckets, boundaries=boundaries, **fields
    )


def by_tokens(
    args: argparse.Namespace, lengths: np.ndarray, limits: jb.Limits
) -> Planned:
    auto = args.num_buckets == "auto"
    num_buckets = _HELD_OUT_BUCKETS if auto else args.num_buckets
    return Planned(plan(lengths, limits, num_buckets, args.boundaries))


def by_operations(
    args: argparse.Namespace, lengths: np.ndarray, limits: jb.Limits
) -> Planned:
    """Plans packed or padded rows, whichever take fewer operations of the model."""
    cost_fn = jb.plan.TransformerCost(args.width, args.layers, transformer.VOCABULARY)
    packed = packed_plan(args, lengths, limits, cost_fn)
    return Planned(in_limits(packed.plan), words=packed.reason, packed=packed.is_packed)


def packed_plan(
    args: argparse.Namespace,
    lengths: np.ndarray,
    limits: jb.Limits,
    cost_fn: CostFn,
) -> jb.packing.PackedPlan:
    return jb.plan_packing(
        lengths,
        max_tokens=limits.max_tokens,
        max_seq_len=limits.max_seq_len,
        num_buckets=args.num_buckets,
        pack=args.pack,
        cost_fn=cost_fn,
        # `segment_attention` skips the blocks of other segments.
        block_sparse=True,
        batch_size_multiple=limits.batch_size_multiple,
        seq_len_multiple=limits.seq_len_multiple,
    )


def in_limits(plan: jb.BucketPlan) -> jb.BucketPlan:
    """Returns the same plan, which truncates longer documents."""
    return dataclasses.replace(plan, overlong="truncate")


def packing(planned: Planned, lengths: np.ndarray) -> jb.packing.Packing | None:
    """Returns the packed rows of a plan, or None if each row has one document."""
    if not planned.packed:
        return None
    return jb.packing.pack(lengths, planned.plan.boundaries.tolist())


def given(path: str, packed: bool) -> Planned:
    """Returns the plan in a file."""
    try:
        plan = jb.BucketPlan.from_json(epath.Path(path).read_text())
        return Planned(plan, packed=packed)
    except (OSError, ValueError) as error:
        raise ValueError(f"`--plan {path}`: {error}") from None


def opening(
    plan: jb.BucketPlan, lengths: np.ndarray, steps: int | None
) -> list[tuple[jb.Bucket, int]]:
    """Returns an opening with `steps` steps of the bucket that has the most."""
    if steps is None:
        return []
    batches = [bucket.batches for bucket in jb.report(plan, lengths).buckets]
    most = int(np.argmax(batches))
    return [(plan.buckets[most], min(steps, batches[most]))]


def by_time(
    args: argparse.Namespace,
    lengths: np.ndarray,
    limits: jb.Limits,
    processes: jb.Processes,
    measure: Measure,
) -> Planned:
    """Returns the plan of the run that is resumed, or one by timing a few shapes."""
    by = {
        "--max-tokens": limits.max_tokens,
        "--max-len": limits.max_seq_len,
        "--batch-size-multiple": limits.batch_size_multiple,
        "--num-buckets": args.num_buckets,
        "--boundaries": args.boundaries,
        "--pack": args.pack,
    }
    kept_plan = _kept(args, by, processes)
    if kept_plan:
        return kept_plan
    start = time.perf_counter()
    buckets = jb.train.calibration_shapes(limits, lengths)
    measured = measure(buckets)
    seconds = time.perf_counter() - start
    packed = False
    if args.pack == "never":
        limits = dataclasses.replace(limits, cost_fn=measured.cost)
        chosen, reason = _choose(args, lengths, limits, measured, seconds)
    else:
        rows = packed_plan(args, lengths, limits, measured.cost)
        chosen, reason, packed = in_limits(rows.plan), rows.reason, rows.is_packed
    words = f"{to_text(measured, seconds)}\n{reason}"
    planned = Planned(chosen, by, words, seconds, measured.to_dict(), packed)
    # Every process has measured its own times. All use the plan of the first one.
    (text, *_) = processes.gather("plan by time", planned.to_json())
    return Planned.from_json(text)


def _kept(
    args: argparse.Namespace, by: dict[str, Any], processes: jb.Processes
) -> Planned | None:
    """Returns the plan of the run that is resumed, or None to plan anew."""
    if not (args.resume or args.resume_changed):
        return None
    folder = epath.Path(args.checkpoint)
    # One process looks, because another might see an earlier state of the folder.
    text = _look(folder) if processes.index == 0 else ""
    text = processes.gather("plan that was kept", text)[0]
    if text == _NO_PLAN and not args.resume_changed:
        raise ValueError(
            f"The run in {folder} was not planned by time, because it has no {FILE}. "
            "Give the options that it had, or continue with `--resume-changed`."
        )
    if text in (_NO_RUN, _NO_PLAN):
        return None
    try:
        planned = Planned.from_json(text)
    except ValueError as error:
        raise ValueError(f"{folder / FILE}: {error}") from None
    before = {"--pack": "never", **planned.by}
    other = [name for name, value in by.items() if before.get(name) != value]
    if other and not args.resume_changed:
        changes = ", ".join(
            f"{name} {before.get(name)} -> {by[name]}" for name in other
        )
        raise ValueError(
            f"Cannot continue with the plan in {folder}, because its options have "
            f"changed: {changes}. Give the former options, or plan anew with "
            "`--resume-changed`."
        )
    return None if other else dataclasses.replace(planned, is_kept=True)


_NO_RUN, _NO_PLAN = "no run", "no plan"


def _look(folder: epath.Path) -> str:
    """Returns the text of the plan, or whether the run or only its plan is missing."""
    if (folder / FILE).exists():
        return (folder / FILE).read_text()
    has_run = folder.exists() and any(x.name.isdecimal() for x in folder.iterdir())
    return _NO_PLAN if has_run else _NO_RUN


def _choose(
    args: argparse.Namespace,
    lengths: np.ndarray,
    limits: jb.Limits,
    measured: jb.train.Calibration,
    spent: float,
) -> tuple[jb.BucketPlan, str]:
    """Returns a plan, and the reason for it."""
    if args.num_buckets != "auto":
        chosen = plan(lengths, limits, args.num_buckets, args.boundaries)
        return chosen, f"{len(chosen)} shapes, as many as asked for."

    def curve_of(num_epochs: float) -> jb.plan.PlanCurve:
        seconds = measured.seconds_per_compile
        return jb.plan.plan_curve(
            lengths, limits, compile_seconds=seconds, num_epochs=num_epochs
        )

    curve = curve_of(1.0)
    for _ in range(_MOST_ROUNDS):
        epochs = _num_epochs(args, curve.chosen, spent)
        if epochs == curve.num_epochs:
            break
        curve = curve_of(epochs)
    return curve.chosen.plan, curve.reason


def _num_epochs(args: argparse.Namespace, point: CurvePoint, spent: float) -> float:
    """Returns the number of epochs of the run with that plan, to two digits."""
    if args.seconds:
        left = args.seconds - spent - point.compile_seconds
        # The plan with the most epochs in this time is the plan with the least time for
        # that many epochs (Dinkelbach, 1967).
        epochs = left / point.epoch_seconds
    else:
        epochs = args.steps / point.steps_per_epoch
    return float(f"{max(epochs, 0.01):.2g}")


def to_text(measured: jb.train.Calibration, seconds: float) -> str:
    cost = measured.cost
    terms = [
        (cost.per_step, 1e3, "ms"),
        (cost.per_token, 1e6, "us per position"),
        (cost.per_pair, 1e9, "ns per pair of them"),
    ]
    formula = " + ".join(
        f"{scale * term:.3g} {unit}" for term, scale, unit in terms if term
    )
    # With few shapes the error cannot be estimated.
    within = "" if math.isnan(cost.error) else f" (within {cost.error:.0%})"
    return (
        f"Measured in {seconds:.0f} s on {len(measured.step_seconds)} shapes: a step "
        f"takes {formula}{within}, compiling one {measured.seconds_per_compile:.1f} s."
    )


def prediction(
    plan: jb.BucketPlan, epoch: jb.plan.Report, records: Sequence[StepRecord]
) -> dict[str, Any]:
    """Returns the time that the plan predicts, and the time that the steps took."""
    predicted = dict(zip(plan.buckets, plan.costs.tolist(), strict=True))
    taken: dict[jb.Bucket, list[float]] = {}
    for record in records:
        taken.setdefault(record.bucket, []).append(record.seconds)
    # A shape without steps counts as predicted.
    at_this_pace = [
        use.batches * float(np.mean(taken.get(bucket, [predicted[bucket]])))
        for bucket, use in zip(plan.buckets, epoch.buckets, strict=True)
    ]
    return {
        "steps": len(records),
        "predicted_seconds": math.fsum(predicted[r.bucket] for r in records),
        "measured_seconds": math.fsum(r.seconds for r in records),
        "epoch_steps": epoch.steps_per_epoch,
        "epoch_predicted_seconds": epoch.epoch_cost,
        "epoch_measured_seconds": math.fsum(at_this_pace),
    }
