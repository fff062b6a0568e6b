"""The setup of a run before compilation: data, mesh and shapes."""

import argparse
import dataclasses
import sys

import jax
import numpy as np
import partition
import policies
import shapes
import training
from example import documents
from options import OF_ONE_PROCESS, SEQ_LEN_MULTIPLE

import jaxbucket as jb
from jaxbucket.data.pipeline import BatchDataset


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
    """A run before compilation.

    Attributes:
      processes: the processes that train together.
      mesh: the devices of all processes.
      limits: the limits of every batch, regardless of the policy.
      planned: the shapes of the bucketed policy, and why they were chosen.
      train: the documents to train on. For some policies, their plan has one shape.
      held_out: the other documents, in the bucketed shapes, regardless of the policy.
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


def prepare(args: argparse.Namespace, processes: jb.Processes) -> Job:
    """Reads and measures the documents, and plans the shapes for them."""
    if args.checkpoint and args.policy not in policies.RESUMABLE:
        raise ValueError(
            f"`--policy {args.policy}` cannot be resumed, because each of its batches "
            "depends on all earlier ones. Remove `--checkpoint`, or choose one of "
            f"{', '.join(policies.RESUMABLE)}."
        )
    if processes.count > 1 and args.policy not in policies.RESUMABLE:
        raise ValueError(
            f"`--policy {args.policy}` gives processes batches of different shapes. "
            f"Start one process, or choose one of {', '.join(policies.RESUMABLE)}."
        )
    if processes.count > 1 and args.seconds:
        raise ValueError(
            "`--seconds` is not supported with several processes, because their clocks "
            "differ. Pass `--steps` instead."
        )
    # Padded rows truncate documents. Packed rows require documents that fit.
    max_len = None if args.pack == "never" else args.max_len
    splits = documents.load(args.data, args.field, max_len)
    lengths = jb.measure_lengths(splits.train)
    held_out = jb.measure_lengths(splits.held_out)
    longest = max(lengths.max(), held_out.max())
    limits = policies.Limits(
        args.max_tokens or args.batch_size_multiple * args.max_len,
        # No longer than the longest document, so that no shape is useless.
        min(args.max_len, -(-longest // SEQ_LEN_MULTIPLE) * SEQ_LEN_MULTIPLE),
        args.batch_size_multiple,
    )
    mesh = partition.make_mesh(args)
    if args.policy == "dynamic":
        # A batch may be as small as the multiple.
        jb.sharding.local_rows(mesh).part_size(limits.batch_size_multiple)
    planned = plan(args, processes, mesh, splits.train, lengths, limits)
    train_plan = planned.plan
    if args.policy != "bucketed":
        train_plan = shapes.plan(lengths, shapes.limits_of(limits), 1, "optimal")
    packing = shapes.packing(planned, lengths)
    evaluated = planned.plan
    if args.pack != "never":
        # Held-out documents are never packed, so that evaluation is the same for all
        # methods.
        evaluated = shapes.by_tokens(args, lengths, shapes.limits_of(limits)).plan
    job = Job(
        processes,
        mesh,
        limits,
        planned,
        Part(
            splits.train,
            jb.BatchSchedule(train_plan, lengths, seed=args.seed, packing=packing),
        ),
        Part(splits.held_out, jb.BatchSchedule(evaluated, held_out, order="source")),
    )
    # Check this before the first call in which processes wait for each other.
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
    """Plans shapes that minimize tokens or time; other policies only evaluate."""
    plan_limits = shapes.limits_of(limits)
    if args.plan:
        return shapes.plan_from_file(args.plan, args.pack == "always")
    if args.cost == "tokens" and args.pack != "never":
        return shapes.by_operations(args, lengths, plan_limits)
    if args.cost == "tokens" or args.policy != "bucketed":
        return shapes.by_tokens(args, lengths, plan_limits)

    def measure(buckets: list[jb.Bucket]) -> jb.train.Calibration:
        tx = training.make_optimizer(args)
        state = training.make_state(args, tx, mesh)
        step = training.make_step(args, tx, mesh, state)
        return jb.train.calibrate(step, state, buckets, source[0], mesh)

    return shapes.by_time(args, lengths, plan_limits, processes, measure)


def dataset(
    job: Job,
    args: argparse.Namespace,
    schedule: jb.BatchSchedule,
    start_step: int = 0,
) -> BatchDataset:
    """Returns the batches of this process."""
    return jb.batch_dataset(
        job.train.source,
        schedule,
        shard=jb.sharding.local_rows(job.mesh),
        start_step=start_step,
        # A run with `--seconds` ends when the time is up.
        num_steps=sys.maxsize if args.seconds else args.steps,
    )
