"""Starts, resumes and saves runs, and prints how to resume them."""

import argparse
import contextlib
import dataclasses
import shlex
import signal
import sys

import optax
import training
from job import Job, dataset
from live import BatchDigest, console

import jaxbucket as jb
from jaxbucket.data.pipeline import BatchDataset


@dataclasses.dataclass
class Progress:
    """The state of a run that changes during training and is saved in checkpoints."""

    state: jb.train.TrainState
    dataset: BatchDataset
    digest: BatchDigest
    step: int = 0
    seconds: float = 0.0


def checkpoints_of(
    args: argparse.Namespace, processes: jb.Processes
) -> contextlib.AbstractContextManager[jb.Checkpoints | None]:
    if args.checkpoint is None:
        return contextlib.nullcontext()
    return jb.Checkpoints(args.checkpoint, keep=args.keep, processes=processes)


def start(
    job: Job,
    args: argparse.Namespace,
    tx: optax.GradientTransformation,
    checkpoints: jb.Checkpoints | None,
) -> Progress:
    """Returns the progress at step 0 or from the newest checkpoint."""
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
                f"`--checkpoint {args.checkpoint}` has a run at step {step}. Continue "
                "it with `--resume`, or choose a different folder."
            )
    if step is None:
        claim(job, args, checkpoints)
        if args.resume or args.resume_changed:
            console.print(
                f"Nothing to resume in {args.checkpoint}: starting at step 0."
            )
        return progress
    if not args.seconds and step > args.steps:
        raise ValueError(
            f"`--steps {args.steps}` is before step {step} of the checkpoint. "
            "Increase it to continue."
        )
    state, position, extra = checkpoints.restore(state)
    rest = remaining(job, args, progress.dataset, position)
    held_out = job.held_out.source.fingerprint
    if extra["held_out"] != held_out and not args.resume_changed:
        raise ValueError(
            f"Cannot resume at step {step}, because held-out documents have changed: "
            f"{extra['held_out'][:8]} -> {held_out[:8]}. Restore them, or continue "
            "with `--resume-changed`."
        )
    console.print(f"Resuming at step {step}.")
    for name, previous in extra["options"].items():
        if previous != getattr(args, name):
            option = name.replace("_", "-")
            console.print(f"Changed: --{option} {previous} -> {vars(args)[name]}")
    job.check_agreement(rest.position(step), args)
    claim(job, args, checkpoints)
    digest = BatchDigest(job.processes, extra["digest"])
    return Progress(state, rest, digest, step, extra["seconds"])


def claim(job: Job, args: argparse.Namespace, checkpoints: jb.Checkpoints) -> None:
    """Makes this the only run in its folder, and writes its plan there."""
    checkpoints.claim()
    if job.processes.index == 0:
        job.planned.save(args.checkpoint)


def remaining(
    job: Job,
    args: argparse.Namespace,
    whole: BatchDataset,
    position: jb.data.DataPosition,
) -> BatchDataset:
    try:
        # Changes from an earlier resume no longer count as changes.
        return whole.resume(position)
    except ValueError as error:
        if args.resume_changed:
            return dataset(job, args, job.train.schedule, position.step)
        raise ValueError(f"{error} In this program, use `--resume-changed`.") from None


def how_to_resume(
    number: signal.Signals, args: argparse.Namespace, step: int, trained: int
) -> str:
    """Returns the message after a run was stopped; it has trained `trained` steps."""
    arguments = [
        word for word in sys.argv if word not in ("--resume", "--resume-changed")
    ]
    # After at least one step, the checkpoint contains the changes.
    flag = "--resume-changed" if args.resume_changed and not trained else "--resume"
    command = shlex.join(["python", *arguments, flag])
    return (
        f"\nStopped by {number.name} after step {step}, which is saved in "
        f"{args.checkpoint}. Continue with:\n{command}"
    )
