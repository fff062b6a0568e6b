"""Trains the language model of the examples, and records all results.

    python benchmarks/end_to_end/run.py
    python benchmarks/end_to_end/run.py --data my.jsonl --json summary.json
    python benchmarks/end_to_end/run.py --checkpoint runs/a
    python benchmarks/end_to_end/run.py --checkpoint runs/a --resume
    python benchmarks/end_to_end/run.py --num-buckets auto
    python benchmarks/end_to_end/run.py --compare --seconds 200 --max-len 2048 --seeds 3
    python scripts/launch_local.py -n 2 -d 2 -- python benchmarks/end_to_end/run.py

This program uses the documents and the model of `examples/train_lm.py`, which you
should read first. All shapes are compiled before the first step, and the last lines
count the programs compiled later. `--num-buckets auto` times steps of a few shapes, and
chooses the plan with the least total time, including compilation. `--policy` selects
another batching method, and `--compare` trains with every method for the same time. The
program runs with several processes if the environment or a cluster configures them.
"""

import argparse
import contextlib
import json
import pathlib
import signal
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

import comparison
import jax
import optax
import policies
import resuming
import shapes
import summary
import training
from evaluation import HeldOut, executables
from job import Job, prepare
from live import Clock, TrainingLog, console
from options import TRAINING, parse_arguments
from records import bucket_stats
from resuming import Progress

import jaxbucket as jb


def main() -> None:
    args = parse_arguments()
    try:
        status = comparison.run(args) if args.compare else train_one(args)
    except (ValueError, OSError) as error:
        sys.exit(f"run.py: {error}")
    except KeyboardInterrupt:
        # While a run with checkpoints trains, `StopRequest` handles it instead.
        status = 128 + signal.SIGINT
    sys.exit(status)


def train_one(args: argparse.Namespace) -> int:
    """Trains with `--policy`, and returns the exit status."""
    training.set_devices(args)
    with jb.Processes(timeout=args.timeout) as processes:
        # All processes would print the same lines.
        console.quiet = processes.index > 0
        job = prepare(args, processes)
        with (
            jb.compile.count_compiles() as compiles,
            resuming.checkpoints_of(args, processes) as checkpoints,
        ):
            return run(job, args, compiles, checkpoints)


def run(
    job: Job,
    args: argparse.Namespace,
    compiles: Counter[str],
    checkpoints: jb.Checkpoints | None,
) -> int:
    """Compiles, trains and evaluates, and returns the exit status."""
    show(job, args)
    tx = training.make_optimizer(args)
    progress = resuming.start(job, args, tx, checkpoints)
    clock = Clock(progress.seconds)
    clock.start()
    steps = compile_train(job, args, tx, progress)
    clock.pause()
    held_out = HeldOut(job.held_out, job.mesh, progress.state, args)
    # Some collectives have short timeouts, so wait for all processes before the first
    # step.
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
        text = resuming.how_to_resume(stopped, args, progress.step, trained)
        console.print(text, soft_wrap=True)
        return 128 + stopped
    clock.pause()
    held_out.evaluate(progress.state, log)
    seconds = {
        "train_step": steps.seconds_waited,
        "eval_step": held_out.steps.seconds_waited,
    }
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
        "buckets": [x.to_dict() for x in bucket_stats(log.records)],
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


def show(job: Job, args: argparse.Namespace) -> None:
    console.print(
        f"{len(job.train.source)} documents to train on, {len(job.held_out.source)} "
        f"held out. {args.policy} on {job.mesh.size} device(s) of "
        f"{job.processes.count} process(es), {args.mode}."
    )
    if job.planned.was_loaded:
        console.print("The shapes are the same as before the run was resumed.")
    if job.planned.words:
        console.print(job.planned.words)
    if args.policy in policies.RESUMABLE:
        console.print("One epoch:")
        console.print(job.train.report)


def compile_train(
    job: Job,
    args: argparse.Namespace,
    tx: optax.GradientTransformation,
    progress: Progress,
) -> jb.compile.CompiledSteps | policies.Jitted:
    step = training.make_step(args, tx, job.mesh, progress.state)
    if args.policy == "dynamic":
        return policies.Jitted(step)
    return jb.compile_steps(
        step,
        progress.state,
        job.train.specs(job.mesh),
        executables=executables(args),
    )


def train(
    job: Job,
    args: argparse.Namespace,
    progress: Progress,
    steps: jb.compile.CompiledSteps | policies.Jitted,
    log: TrainingLog,
    checkpoints: jb.Checkpoints | None,
    held_out: HeldOut,
) -> signal.Signals | None:
    """Trains until the end or until a signal, and returns the signal."""

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
    has_ended = progress.step > 0 and log.done >= 1
    feed = [] if has_ended else batches(job, args, progress)
    # A single process without checkpoints is ended immediately by a signal. With
    # several processes, jax handles SIGTERM.
    stops = bool(checkpoints) or job.processes.count > 1
    request = jb.StopRequest(job.processes) if stops else contextlib.nullcontext()
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
                    held_out.evaluate(progress.state, log)
        log.settle()
        save()
        if checkpoints:
            # Save before the default signal handlers are restored.
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


def compiled_by_all(
    job: Job,
    steps: jb.compile.CompiledSteps | policies.Jitted,
    ahead: dict[str, int],
    compiles: Counter[str],
) -> list[dict[str, Any]]:
    """Returns which shapes each process has compiled for training, and how often."""
    compiled = {
        "shapes": sorted([b.batch_size, b.seq_len] for b in steps.seconds),
        "ahead": ahead["train_step"],
        "later": compiles["train_step"] - ahead["train_step"],
    }
    replies = job.processes.gather("compiled shapes", json.dumps(compiled))
    return [json.loads(text) for text in replies]


def report(numbers: dict[str, Any], log: TrainingLog, args: argparse.Namespace) -> None:
    console.print(summary.to_text(numbers))
    if args.json:
        pathlib.Path(args.json).write_text(summary.to_json(numbers) + "\n")
    # A run that was complete before it was resumed has no steps to draw.
    if args.plot and log.records:
        summary.draw(log.records, args.plot)


if __name__ == "__main__":
    main()
