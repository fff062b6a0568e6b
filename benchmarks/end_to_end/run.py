"""Trains the example's language model in many ways, and records every number.

    python benchmarks/end_to_end/run.py
    python benchmarks/end_to_end/run.py --data my.jsonl --json summary.json
    python benchmarks/end_to_end/run.py --checkpoint runs/a
    python benchmarks/end_to_end/run.py --checkpoint runs/a --resume
    python benchmarks/end_to_end/run.py --num-buckets auto
    python benchmarks/end_to_end/run.py --compare --seconds 200 --max-len 2048 --seeds 3
    python scripts/launch_local.py -n 2 -d 2 -- python benchmarks/end_to_end/run.py

The documents and the model are those of `examples/train_lm.py`, which is the program to
read first. All shapes are compiled before the first step, and the last lines count the
programs compiled later. `--num-buckets auto` times steps of a few shapes, and plans the
least time, compiling included. `--policy` makes batches in other ways, and `--compare`
trains in every way for the same time. Several processes train as one, if the
environment or a cluster says that there are several.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import pathlib
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import comparison
import jax
import numpy as np
import optax
import partition
import policies
import shapes
import summary
import training
from example import documents, recipe
from live import BatchDigest, Clock, TrainingLog, console
from options import OF_ONE_PROCESS, SEQ_LEN_MULTIPLE, TRAINING, parse_arguments

import jaxbucket as jb
from jaxbucket.data.pipeline import BatchDataset
from jaxbucket.plan.reports.run import bucket_uses


@dataclasses.dataclass(frozen=True)
class Part:
    """Documents, and the schedule that batches them."""

    source: documents.Examples
    schedule: jb.BatchSchedule

    @property
    def report(self) -> jb.plan.Report:
        return self.schedule.report()

    def specs(self, mesh: jax.sharding.Mesh) -> dict[jb.Bucket, jb.Batch]:
        return jb.sharding.batch_specs(self.schedule.plan, self.source[0], mesh)


@dataclasses.dataclass(frozen=True)
class Job:
    """All that is settled before anything compiles.

    Attributes:
      processes: those that train together.
      mesh: where batches go.
      limits: what every batch keeps to, whatever the policy.
      planned: the shapes of the bucketed policy, and why these.
      train: the documents to train on; their plan has one shape for some policies.
      held_out: the others, in the shapes of the bucketed plan whatever the policy.
    """

    processes: jb.Processes
    mesh: jax.sharding.Mesh
    limits: policies.Limits
    planned: shapes.Planned
    train: Part
    held_out: Part

    def check_agreement(
        self, position: jb.data.DataPosition, args: argparse.Namespace
    ) -> None:
        options = {
            f"--{name.replace('_', '-')}": value
            for name, value in vars(args).items()
            if name not in OF_ONE_PROCESS
        }
        options["held-out documents"] = self.held_out.source.fingerprint
        self.processes.check_agreement(position, self.mesh, options)


@dataclasses.dataclass
class Progress:
    """What training changes, and a checkpoint keeps."""

    state: jb.train.TrainState
    dataset: BatchDataset
    digest: BatchDigest
    step: int = 0
    seconds: float = 0.0


class HeldOut:
    """Every held-out document once, in source order, always in the same shapes.

    Attributes:
      steps: an executable for each shape.
      curve: what every evaluation found, and when.
    """

    def __init__(
        self,
        part: Part,
        mesh: jax.sharding.Mesh,
        state: jb.train.TrainState,
        args: argparse.Namespace,
    ):
        eval_step = jb.make_eval_step(recipe.loss_fn, mesh, mode=args.mode)
        self.steps = jb.compile_steps(
            eval_step,
            state,
            part.specs(mesh),
            # Nor does training wait for what evaluates it.
            opening=part.schedule.bucket_order() if args.opening else (),
            executables=executables(args),
        )
        self.curve: list[dict[str, Any]] = []
        self._mesh = mesh
        self._dataset = jb.batch_dataset(
            part.source, part.schedule, shard=jb.sharding.local_rows(mesh)
        )

    def note(self, state: jb.train.TrainState, log: TrainingLog) -> None:
        """Evaluates, and adds the result to the curve."""
        start = time.perf_counter()
        totals = Counter[str]()
        for batch in jb.sharding.prefetch_to_mesh(self._dataset, self._mesh):
            totals.update(jax.tree.map(float, self.steps(state, batch)))
        self.curve.append(
            {
                "step": log.step,
                "seconds": log.seconds,
                "documents": int(totals["num_examples"]),
                "bytes": int(totals["weight"]),
                "bits_per_byte": totals["loss_sum"] / totals["weight"] / math.log(2),
                "evaluation_seconds": time.perf_counter() - start,
            }
        )


def main() -> None:
    args = parse_arguments()
    try:
        status = comparison.run(args) if args.compare else train_one_way(args)
    except (ValueError, OSError) as error:
        sys.exit(f"run.py: {error}")
    except KeyboardInterrupt:
        # Of a run that is training with checkpoints it is a request, and not seen here.
        status = 128 + signal.SIGINT
    sys.exit(status)


def train_one_way(args: argparse.Namespace) -> int:
    """Returns the exit status."""
    training.set_devices(args)
    with jb.Processes(timeout=args.timeout) as processes:
        # What is said is the same in all of them.
        console.quiet = processes.index > 0
        job = prepare(args, processes)
        with (
            jb.compile.count_compiles() as compiles,
            checkpoints_of(args, processes) as checkpoints,
        ):
            return run(job, args, compiles, checkpoints)


def prepare(args: argparse.Namespace, processes: jb.Processes) -> Job:
    """Reads and measures the documents, and plans the shapes for them."""
    if args.checkpoint and args.policy not in policies.RESUMABLE:
        raise ValueError(
            f"`--policy {args.policy}` cannot be resumed, for its batches depend on "
            "all before them: leave out `--checkpoint`, or choose one of "
            f"{', '.join(policies.RESUMABLE)}."
        )
    if processes.count > 1 and args.policy not in policies.RESUMABLE:
        raise ValueError(
            f"`--policy {args.policy}` gives every process batches of its own shapes: "
            f"start one process, or choose one of {', '.join(policies.RESUMABLE)}."
        )
    if processes.count > 1 and args.seconds:
        raise ValueError(
            "`--seconds` is of one clock, and every process has its own: give --steps."
        )
    # Padded rows truncate documents. Packed ones need documents that fit.
    max_len = None if args.pack == "never" else args.max_len
    split = documents.load(args.data, args.field, max_len)
    lengths = jb.measure_lengths(split.train)
    held_out = jb.measure_lengths(split.held_out)
    longest = max(lengths.max(), held_out.max())
    limits = policies.Limits(
        args.max_tokens or args.batch_size_multiple * args.max_len,
        # Shorter than asked where no document is that long: no shape for nothing.
        min(args.max_len, -(-longest // SEQ_LEN_MULTIPLE) * SEQ_LEN_MULTIPLE),
        args.batch_size_multiple,
    )
    mesh = partition.make_mesh(args)
    if args.policy == "dynamic":
        # A batch may be as small as the multiple.
        jb.sharding.local_rows(mesh).part_size(limits.batch_size_multiple)
    planned = plan(args, processes, mesh, split.train, lengths, limits)
    train_plan = planned.plan
    if args.policy != "bucketed":
        train_plan = shapes.plan(lengths, shapes.limits_of(limits), 1, "optimal")
    opening = shapes.opening(train_plan, lengths, args.opening)
    packing = shapes.packing(planned, lengths)
    evaluated = planned.plan
    if args.pack != "never":
        # Held-out documents have a row each, and are the same ones whatever is packed.
        evaluated = shapes.by_tokens(args, lengths, shapes.limits_of(limits)).plan
    job = Job(
        processes,
        mesh,
        limits,
        planned,
        Part(
            split.train,
            jb.BatchSchedule(
                train_plan, lengths, seed=args.seed, opening=opening, packing=packing
            ),
        ),
        Part(split.held_out, jb.BatchSchedule(evaluated, held_out, order="source")),
    )
    # Before anything that one of them would wait for the others in.
    job.check_agreement(dataset(job, args, job.train.schedule).position(0), args)
    return job


def plan(
    args: argparse.Namespace,
    processes: jb.Processes,
    mesh: jax.sharding.Mesh,
    source: documents.Examples,
    lengths: np.ndarray,
    limits: policies.Limits,
) -> shapes.Planned:
    """The shapes, by tokens or by time; in the other ways only to evaluate in."""
    kept_to = shapes.limits_of(limits)
    if args.plan:
        return shapes.given(args.plan, args.pack == "always")
    if args.cost == "tokens" and args.pack != "never":
        return shapes.by_operations(args, lengths, kept_to)
    if args.cost == "tokens" or args.policy != "bucketed":
        return shapes.by_tokens(args, lengths, kept_to)

    def measure(buckets: list[jb.Bucket]) -> jb.train.Calibration:
        tx = training.make_optimizer(args)
        state = training.make_state(args, tx, mesh)
        step = training.make_step(args, tx, mesh, state)
        return jb.train.calibrate(step, state, buckets, source[0], mesh)

    return shapes.by_time(args, lengths, kept_to, processes, measure)


def checkpoints_of(
    args: argparse.Namespace, processes: jb.Processes
) -> contextlib.AbstractContextManager[jb.Checkpoints | None]:
    if args.checkpoint is None:
        return contextlib.nullcontext()
    return jb.Checkpoints(args.checkpoint, keep=args.keep, processes=processes)


def run(
    job: Job,
    args: argparse.Namespace,
    compiles: Counter[str],
    checkpoints: jb.Checkpoints | None,
) -> int:
    """Compiles, trains and evaluates; returns the exit status."""
    show(job, args)
    tx = training.make_optimizer(args)
    progress = begin(job, args, tx, checkpoints)
    clock = Clock(progress.seconds)
    clock.start()
    steps = compile_train(job, args, tx, progress)
    clock.pause()
    held_out = HeldOut(job.held_out, job.mesh, progress.state, args)
    # In the first step they wait for one another, but some collectives not for long.
    job.processes.gather("compiled", "")
    clock.start()
    log = TrainingLog(
        clock,
        num_steps=None if args.seconds else args.steps,
        seconds=args.seconds,
        first_step=progress.step,
    )
    first_step = progress.step
    stopped = train(job, args, progress, steps, log, checkpoints, held_out)
    if stopped:
        trained = progress.step - first_step
        console.print(
            how_to_go_on(stopped, args, progress.step, trained), soft_wrap=True
        )
        return 128 + stopped
    clock.pause()
    held_out.note(progress.state, log)
    seconds = {
        "train_step": steps.seconds_waited,
        "eval_step": held_out.steps.seconds_waited,
    }
    # What was compiled beside training counts as ahead, too.
    steps.wait()
    held_out.steps.wait()
    ahead = {
        "train_step": steps.report.num_compiled,
        "eval_step": held_out.steps.report.num_compiled,
    }
    numbers = {
        "versions": {"jaxbucket": jb.__version__, "jax": jax.__version__},
        "devices": [str(device) for device in job.mesh.devices.flat],
        "arguments": vars(args),
        "plan": json.loads(job.train.schedule.plan.to_json()),
        "planning": {
            "words": job.planned.words,
            "seconds": job.planned.seconds,
            "measured": job.planned.measured,
        },
        "schedule": job.train.schedule.fingerprint,
        "epoch": job.train.report.to_dict(),
        "compile": {
            name: {
                "ahead": ahead[name],
                "seconds": waited,
                "later": compiles[name] - ahead[name],
            }
            for name, waited in seconds.items()
        },
        "seconds": clock.seconds,
        "train": {**log.summary(), "batches_digest": progress.digest.total()},
        "compiled": compiled_by_all(job, steps, ahead, compiles),
        "buckets": [use.to_dict() for use in bucket_uses(log.records)],
        "params_digest": summary.digest(progress.state.params),
        "curve": held_out.curve,
        "held_out": held_out.curve[-1],
    }
    train_plan, epoch = job.train.schedule.plan, job.train.report
    if epoch.cost_unit == "s":
        numbers["prediction"] = shapes.prediction(train_plan, epoch, log.records)
    if job.processes.index == 0:
        report(numbers, log, args)
    return 0


def compiled_by_all(
    job: Job,
    steps: jb.compile.CompiledSteps | policies.Jitted,
    ahead: dict[str, int],
    compiles: Counter[str],
) -> list[dict[str, Any]]:
    """Which shapes each process has compiled for training, and how often."""
    compiled = {
        "shapes": sorted([b.batch_size, b.seq_len] for b in steps.seconds),
        "ahead": ahead["train_step"],
        "later": compiles["train_step"] - ahead["train_step"],
    }
    replies = job.processes.gather("compiled shapes", json.dumps(compiled))
    return [json.loads(text) for text in replies]


def report(numbers: dict[str, Any], log: TrainingLog, args: argparse.Namespace) -> None:
    console.print(summary.in_words(numbers))
    if args.json:
        pathlib.Path(args.json).write_text(summary.to_json(numbers) + "\n")
    # There is no step where a run is resumed that was over.
    if args.plot and log.records:
        summary.draw(log.records, args.plot)


def show(job: Job, args: argparse.Namespace) -> None:
    console.print(
        f"{len(job.train.source)} documents to train on, {len(job.held_out.source)} "
        f"held out. {args.policy} on {job.mesh.size} device(s) of "
        f"{job.processes.count} process(es), {args.mode}."
    )
    if job.planned.is_kept:
        console.print("The shapes are those that the run began with.")
    if job.planned.words:
        console.print(job.planned.words)
    if args.policy in policies.RESUMABLE:
        console.print("One epoch:")
        console.print(job.train.report)


def begin(
    job: Job,
    args: argparse.Namespace,
    tx: optax.GradientTransformation,
    checkpoints: jb.Checkpoints | None,
) -> Progress:
    """Step 0, or where a checkpoint says to go on."""
    state = training.make_state(args, tx, job.mesh)
    digest = BatchDigest(job.processes)
    progress = Progress(
        state,
        dataset(job, args, job.train.schedule),
        digest,
        seconds=job.planned.seconds,
    )
    if checkpoints is None:
        return progress
    step = checkpoints.latest_step
    if not (args.resume or args.resume_changed):
        if step is not None:
            raise ValueError(
                f"`--checkpoint {args.checkpoint}` has a run at step {step}: go on "
                "with it by `--resume`, or name another folder."
            )
    if step is None:
        claim(job, args, checkpoints)
        if args.resume or args.resume_changed:
            console.print(
                f"Nothing to resume in {args.checkpoint}: beginning at step 0."
            )
        return progress
    if not args.seconds and step > args.steps:
        raise ValueError(
            f"`--steps {args.steps}` ends before step {step}, where the checkpoint is: "
            "give more, to go on."
        )
    state, position, extra = checkpoints.restore(state)
    rest = going_on(job, args, progress.dataset, position)
    held_out = job.held_out.source.fingerprint
    if extra["held_out"] != held_out and not args.resume_changed:
        raise ValueError(
            f"Cannot go on at step {step}, for the held-out documents have changed: "
            f"{extra['held_out'][:8]} -> {held_out[:8]}. Give back what they were, or "
            "go on by `--resume-changed`."
        )
    console.print(f"Going on at step {step}.")
    for name, was in extra["options"].items():
        if was != getattr(args, name):
            option = name.replace("_", "-")
            console.print(f"Other than before: --{option} {was} -> {vars(args)[name]}")
    job.check_agreement(rest.position(step), args)
    claim(job, args, checkpoints)
    digest = BatchDigest(job.processes, extra["digest"])
    return Progress(state, rest, digest, step, extra["seconds"])


def claim(job: Job, args: argparse.Namespace, checkpoints: jb.Checkpoints) -> None:
    """Makes this the only run in its folder, and keeps its shapes there."""
    checkpoints.claim()
    if job.processes.index == 0:
        job.planned.keep(args.checkpoint)


def dataset(
    job: Job, args: argparse.Namespace, schedule: jb.BatchSchedule
) -> BatchDataset:
    return jb.batch_dataset(
        job.train.source,
        schedule,
        shard=jb.sharding.local_rows(job.mesh),
        # Until the time is over, where there is no number of steps.
        num_steps=sys.maxsize if args.seconds else args.steps,
    )


def going_on(
    job: Job,
    args: argparse.Namespace,
    whole: BatchDataset,
    position: jb.data.DataPosition,
) -> BatchDataset:
    try:
        # Also where it has gone on with these changes before: not once more.
        return whole.resume(position)
    except ValueError as error:
        if args.resume_changed:
            return dataset(job, args, job.train.schedule.continue_with(position))
        raise ValueError(f"{error} Here that is `--resume-changed`.") from None


def compile_train(
    job: Job,
    args: argparse.Namespace,
    tx: optax.GradientTransformation,
    progress: Progress,
) -> jb.compile.CompiledSteps | policies.Jitted:
    step = training.make_step(args, tx, job.mesh, progress.state)
    if args.policy == "dynamic":
        return policies.Jitted(step)
    opening = job.train.schedule.bucket_order(progress.step) if args.opening else ()
    return jb.compile_steps(
        step,
        progress.state,
        job.train.specs(job.mesh),
        opening=opening,
        executables=executables(args),
    )


def executables(args: argparse.Namespace) -> jb.ExecutableCache | None:
    """Where they are kept: as asked for, or beside the checkpoints."""
    folder = args.executables
    if folder is None and args.checkpoint and "://" not in args.checkpoint:
        folder = pathlib.Path(args.checkpoint, "executables")
    return jb.ExecutableCache(folder, verify=args.verify) if folder else None


def train(
    job: Job,
    args: argparse.Namespace,
    progress: Progress,
    steps: jb.compile.CompiledSteps | policies.Jitted,
    log: TrainingLog,
    checkpoints: jb.Checkpoints | None,
    held_out: HeldOut,
) -> signal.Signals | None:
    """Trains to the end, or until a signal asks to stop; returns that, if it does."""

    def save() -> None:
        if checkpoints:
            checkpoints.save(
                progress.state,
                progress.dataset.position(progress.step),
                {
                    "digest": progress.digest.total(),
                    "seconds": log.seconds,
                    "held_out": job.held_out.source.fingerprint,
                    "options": {name: vars(args)[name] for name in TRAINING},
                },
            )

    points = 1
    is_over = progress.step > 0 and log.done >= 1
    feed = [] if is_over else batches(job, args, progress)
    # One process without a checkpoint has nothing to finish for. Of several, jax has
    # SIGTERM.
    asks = bool(checkpoints) or job.processes.count > 1
    request = jb.StopRequest(job.processes) if asks else contextlib.nullcontext()
    with request as stop, log:
        for batch in jb.sharding.prefetch_to_mesh(feed, job.mesh):
            if stop and stop.before(progress.step):
                break
            progress.state, metrics = steps(progress.state, batch)
            progress.step += 1
            log.add(batch, metrics)
            progress.digest.add(batch, progress.step)
            if progress.step % args.save_every == 0:
                save()
            if log.done >= 1:
                break
            if log.done * args.points >= points:
                points = int(log.done * args.points) + 1
                with log.paused():
                    held_out.note(progress.state, log)
        log.settle()
        save()
        if checkpoints:
            # Before signals are again what they are without us.
            checkpoints.wait()
    return stop.signal if stop else None


def batches(
    job: Job, args: argparse.Namespace, progress: Progress
) -> Iterable[jb.Batch]:
    if args.policy == "dynamic":
        return policies.dynamic(job.train.source, job.limits, args.seed)
    if args.policy == "grain-pack":
        (bucket,) = job.train.schedule.plan.buckets
        return policies.grain_pack(job.train.source, bucket, job.limits, args.seed)
    return progress.dataset


def how_to_go_on(
    number: signal.Signals, args: argparse.Namespace, step: int, trained: int
) -> str:
    """What to print where a run was stopped, `trained` steps after it began."""
    words = [word for word in sys.argv if word not in ("--resume", "--resume-changed")]
    # What has changed is in the checkpoint once a step is.
    how = "--resume-changed" if args.resume_changed and not trained else "--resume"
    command = shlex.join(["python", *words, how])
    return (
        f"\nStopped by {number.name} after step {step}, which is saved in "
        f"{args.checkpoint}. Go on with:\n{command}"
    )


if __name__ == "__main__":
    main()
