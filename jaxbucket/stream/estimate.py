"""The number of steps of a stream, estimated from the lengths that are known."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxbucket.base.buckets import BucketPlan
from jaxbucket.plan.chunks import row_lengths
from jaxbucket.stream.bucket_sequence import rows_by_bucket

# The sample is divided into so many parts, whose differences show the error.
_PARTS = 16
# Standard errors on either side of a mean that hold 95% of cases (Student's
# distribution).
_WIDTH = 2.13


class StepEstimate(NamedTuple):
    """The number of steps of an epoch.

    Attributes:
      steps: the estimated number.
      error: the true number differs by at most this much, with a probability of 95% if
        the known lengths are a random sample.
    """

    steps: float
    error: float


def estimate_steps(
    plan: BucketPlan,
    lengths: np.ndarray,
    num_examples: int,
    max_segments: int | None = None,
    accumulate: int = 1,
) -> StepEstimate:
    """Returns the steps of a stream of some number of examples.

    Example: half of the examples fill batches of 300 rows, and half of 150.
      >>> import jaxbucket as jb
      >>> lengths = np.random.default_rng(0).integers(1, 3, size=1000)
      >>> plan = jb.plan_buckets(lengths, max_tokens=300, num_buckets=2, sample=True)
      >>> steps, error = estimate_steps(plan, lengths, num_examples=300_000)
      >>> round(steps), round(error)
      (1538, 22)

    Args:
      plan: the shapes.
      lengths: `[N]` or `[N, Q]` integers, a sample of at least 16 lengths.
      num_examples: the number of examples in an epoch, at least that of the sample.
      max_segments: as for `rows_by_bucket`.
      accumulate: the number of micro-batches of a step.
    """
    if not _PARTS <= len(lengths) <= num_examples:
        raise ValueError(
            f"`num_examples={num_examples}` is estimated from {len(lengths)} "
            f"`lengths`. Pass {_PARTS} or more of these, and at least as many examples."
        )

    def batches_per_example(sample: np.ndarray) -> float:
        rows = rows_by_bucket(plan, row_lengths(plan, sample), max_segments)
        return float((rows / plan.batch_sizes).sum()) / len(sample)

    mean = batches_per_example(lengths)
    parts = np.array_split(lengths, _PARTS)
    means = [batches_per_example(part) for part in parts]
    spread = np.std(means, ddof=1) / np.sqrt(_PARTS)
    # Known lengths are not uncertain.
    unknown = np.sqrt(max(0.0, 1 - len(lengths) / num_examples))
    error = _WIDTH * spread * num_examples * unknown
    # At the end of the stream, each bucket may have a step with empty rows.
    rest = len(plan) / 2
    steps = num_examples * mean / accumulate + rest
    return StepEstimate(steps, float(error / accumulate + rest))
