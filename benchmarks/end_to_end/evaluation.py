"""Evaluation on the held-out documents, with compiled steps."""

import argparse
import math
import pathlib
import time
from collections import Counter
from typing import Any

import jax
from example import recipe
from job import Part
from live import TrainingLog

import jaxbucket as jb


class HeldOut:
    """Evaluates every held-out document, in source order and with fixed shapes.

    Attributes:
      steps: the compiled evaluation steps.
      curve: the result of every evaluation, with its step and time.
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
            executables=executables(args),
        )
        self.curve: list[dict[str, Any]] = []
        self._mesh = mesh
        self._dataset = jb.batch_dataset(
            part.source, part.schedule, shard=jb.sharding.local_rows(mesh)
        )

    def evaluate(self, state: jb.train.TrainState, log: TrainingLog) -> None:
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


def executables(args: argparse.Namespace) -> pathlib.Path | str | None:
    """Returns the folder of executables, by default in the folder of checkpoints."""
    folder = args.executables
    if folder is None and args.checkpoint and "://" not in args.checkpoint:
        folder = pathlib.Path(args.checkpoint, "executables")
    return folder
