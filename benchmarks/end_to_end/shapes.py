"""The shapes of a run, planned to minimize tokens, or time on this machine.

Measured times vary. A plan that minimizes time is therefore saved as `plan.json` in the
folder of the checkpoints, so that a resumed run has the same shapes.
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
from records import StepRecord

import jaxbucket as jb
from jaxbucket.plan.costs import CostFn
from jaxbucket.plan.reports.curve import CurvePoint

FILE = "plan.json"
# The number of shapes for held-out documents with `--num-buckets auto`.
_HELD_OUT_BUCKETS = 8
# The number of epochs and the plan depend on each other. A few iterations are enough to
# converge.
_MAX_ROUNDS = 8

Measure = Callable[[list[jb.Bucket]], jb.train.Calibration]


@dataclasses.dataclass(frozen=True)
class Planned:
    """A plan, and how it was made.

    Attributes:
      plan: the shapes.
      by: the options that determined the plan. Empty for a plan that minimizes tokens,
        which is cheap to recompute.
      words: a description of the measurement and of the choice.
      seconds: the time spent on measuring.
      measured: all measured values.
      packed: whether rows have several documents.
      was_loaded: whether the plan was loaded from the folder of the run.
    """

    plan: jb.BucketPlan
    by: dict[str, Any] = dataclasses.field(default_factory=dict)
    words: str = ""
    seconds: float = 0.0
    measured: dict[str, Any] = dataclasses.field(default_factory=dict)
    packed: bool = False
    was_loaded: bool = False

    def to_json(self) -> str:
        """Returns a plan that `jaxbucket report` can read, and the other fields."""
        fields = {name: getattr(self, name) for name in _OTHER_FIELDS}
        return json.dumps({**json.loads(self.plan.to_json()), "notes": fields})

    @classmethod
    def from_json(cls, text: str) -> "Planned":
        plan = jb.BucketPlan.from_json(text)
        fields = json.loads(text).get("notes")
        if not isinstance(fields, dict) or fields.keys() != _OTHER_FIELDS:
            raise ValueError("The plan does not have the options that determined it.")
        return cls(plan, **fields)

    def save(self, folder: str) -> None:
        """Writes the plan atomically to the folder of the checkpoints."""
        if self.by and not self.was_loaded:
            path = epath.Path(folder) / FILE
            part = path.with_name(f"{FILE}.part")
            part.write_text(self.to_json())
            part.replace(path)


_OTHER_FIELDS = {field.name for field in dataclasses.fields(Planned)} - {
    "plan",
    "was_loaded",
}


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
    return jb.plan.plan_within(
        lengths, limits, num_buckets=num_buckets, boundaries=boundaries
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
    """Plans packed or padded rows, whichever need fewer operations."""
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


def plan_from_file(path: str, packed: bool) -> Planned:
    """Reads a plan from a file."""
    try:
        plan = jb.BucketPlan.from_json(epath.Path(path).read_text())
        if plan.packed and not packed:
            raise ValueError("It is for packed rows. Add `--pack always`.")
        return Planned(plan, packed=packed)
    except (OSError, ValueError) as error:
        raise ValueError(f"`--plan {path}`: {error}") from None


def by_time(
    args: argparse.Namespace,
    lengths: np.ndarray,
    limits: jb.Limits,
    processes: jb.Processes,
    measure: Measure,
) -> Planned:
    """Loads the plan of the resumed run, or times a few shapes to plan."""
    by = {
        "--max-tokens": limits.max_tokens,
        "--max-len": limits.max_seq_len,
        "--batch-size-multiple": limits.batch_size_multiple,
        "--num-buckets": args.num_buckets,
        "--boundaries": args.boundaries,
        "--pack": args.pack,
    }
    loaded = _load_plan(args, by, processes)
    if loaded:
        return loaded
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
    # Every process has measured different times. All use the plan of process 0.
    (text, *_) = processes.gather("plan by time", planned.to_json())
    return Planned.from_json(text)


def _load_plan(
    args: argparse.Namespace, by: dict[str, Any], processes: jb.Processes
) -> Planned | None:
    """Returns the plan of the resumed run, or None to compute a new plan."""
    if not (args.resume or args.resume_changed):
        return None
    folder = epath.Path(args.checkpoint)
    # Only process 0 reads the file, because other processes may see older contents.
    text = _read_saved_plan(folder) if processes.index == 0 else ""
    text = processes.gather("plan that was kept", text)[0]
    if text == _NO_PLAN and not args.resume_changed:
        raise ValueError(
            f"The run in {folder} was not planned by time, because it has no {FILE}. "
            "Use the original options, or continue with `--resume-changed`."
        )
    if text in (_NO_RUN, _NO_PLAN):
        return None
    try:
        planned = Planned.from_json(text)
    except ValueError as error:
        raise ValueError(f"{folder / FILE}: {error}") from None
    before = {"--pack": "never", **planned.by}
    changed = [name for name, value in by.items() if before.get(name) != value]
    if changed and not args.resume_changed:
        changes = ", ".join(
            f"{name} {before.get(name)} -> {by[name]}" for name in changed
        )
        raise ValueError(
            f"Cannot continue with the plan in {folder}, because its options have "
            f"changed: {changes}. Use the original options, or compute a new plan "
            "with `--resume-changed`."
        )
    return None if changed else dataclasses.replace(planned, was_loaded=True)


_NO_RUN, _NO_PLAN = "no run", "no plan"


def _read_saved_plan(folder: epath.Path) -> str:
    """Returns the plan as text, or whether the run or only its plan is missing."""
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
        return chosen, f"{len(chosen)} shapes, as requested."

    def curve_of(num_epochs: float) -> jb.plan.PlanCurve:
        seconds = measured.seconds_per_compile
        return jb.plan.plan_curve(
            lengths, limits, compile_seconds=seconds, num_epochs=num_epochs
        )

    curve = curve_of(1.0)
    for _ in range(_MAX_ROUNDS):
        epochs = _num_epochs(args, curve.chosen, spent)
        if epochs == curve.num_epochs:
            break
        curve = curve_of(epochs)
    return curve.chosen.plan, curve.reason


def _num_epochs(args: argparse.Namespace, point: CurvePoint, spent: float) -> float:
    """Returns the number of epochs of the run with a plan, to two digits."""
    if args.seconds:
        left = args.seconds - spent - point.compile_seconds
        # The plan that fits the most epochs into this time is also the fastest plan for
        # that number of epochs (Dinkelbach, 1967).
        epochs = left / point.epoch_seconds
    else:
        epochs = args.steps / point.steps_per_epoch
    return float(f"{max(epochs, 0.01):.2g}")


def to_text(measured: jb.train.Calibration, seconds: float) -> str:
    cost = measured.cost
    terms = [
        (cost.per_step, 1e3, "ms"),
        (cost.per_token, 1e6, "us per position"),
        (cost.per_pair, 1e9, "ns per pair of positions"),
    ]
    formula = " + ".join(
        f"{scale * term:.3g} {unit}" for term, scale, unit in terms if term
    )
    # With few shapes the error cannot be estimated.
    within = "" if math.isnan(cost.error) else f" (within {cost.error:.0%})"
    return (
        f"Measured in {seconds:.0f} s on {len(measured.step_seconds)} shapes: a step "
        f"takes {formula}{within}, and compiling one takes "
        f"{measured.seconds_per_compile:.1f} s."
    )


def prediction(
    plan: jb.BucketPlan, epoch: jb.plan.Report, records: Sequence[StepRecord]
) -> dict[str, Any]:
    """Returns the predicted and the measured time of the steps and of an epoch."""
    predicted = dict(zip(plan.buckets, plan.costs.tolist(), strict=True))
    taken: dict[jb.Bucket, list[float]] = {}
    for record in records:
        taken.setdefault(record.bucket, []).append(record.seconds)
    # Use the predicted time for shapes without steps.
    at_this_speed = [
        use.batches * float(np.mean(taken.get(bucket, [predicted[bucket]])))
        for bucket, use in zip(plan.buckets, epoch.buckets, strict=True)
    ]
    return {
        "steps": len(records),
        "predicted_seconds": math.fsum(predicted[r.bucket] for r in records),
        "measured_seconds": math.fsum(r.seconds for r in records),
        "epoch_steps": epoch.steps_per_epoch,
        "epoch_predicted_seconds": epoch.epoch_cost,
        "epoch_measured_seconds": math.fsum(at_this_speed),
    }
