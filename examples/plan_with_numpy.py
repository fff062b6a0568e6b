"""Plans shapes and batches with numpy alone, for PyTorch, TensorFlow or a data job.

    python examples/plan_with_numpy.py

jaxbucket imports jax only where it needs it, and here it does not. The plan, the batch
indices and the padded arrays are plain Python and numpy. Any framework can train on
them, in any number of workers.
"""

import argparse
import sys
from collections.abc import Sequence

import numpy as np

import jaxbucket as jb


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Plan batches with numpy alone.")
    parser.add_argument(
        "--examples", type=int, default=10_000, help="number of examples"
    )
    parser.add_argument("--workers", type=int, default=4, help="number of workers")
    args = parser.parse_args(argv)

    # Planning needs only the lengths of the data.
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(4.5, 0.8, args.examples), 1, 1024).astype(int)

    # Up to 6 shapes (B, T) with up to 16,384 tokens. B is divisible by the workers.
    plan = jb.plan_buckets(
        lengths,
        max_tokens=16_384,
        num_buckets=6,
        batch_size_multiple=args.workers,
        seq_len_multiple=8,
    )
    print(f"shapes: {', '.join(map(str, plan.buckets))}")
    print(jb.report(plan, lengths).summary)

    # The examples of any step can be computed without computing earlier steps. The same
    # seed gives the same batches in every worker, so all have the same shape at a step.
    schedule = jb.BatchSchedule(plan, lengths, seed=0)
    seen = np.zeros(args.examples, dtype=int)
    for step in range(len(schedule)):
        indices = schedule[step]
        # Empty rows are -1: the last batch of a bucket may not be full.
        real = indices.rows[indices.rows >= 0]
        seen += np.bincount(real, minlength=args.examples)
    print(f"{len(schedule)} steps, and every example once: {bool(np.all(seen == 1))}")

    # Each worker loads its part of the rows, and pads them to the common shape.
    step = len(schedule) + 7  # in the second epoch
    indices = schedule[step]
    for worker, rows in enumerate(np.split(indices.rows, args.workers)):
        examples = [load(index, lengths) for index in rows if index >= 0]
        local = jb.Bucket(len(rows), indices.bucket.seq_len)
        batch = jb.data.collate_rows(examples, local)
        tokens, mask = batch.features["tokens"], batch.mask
        # torch.from_numpy(tokens), or tf.convert_to_tensor(tokens), goes here.
        print(f"worker {worker}: tokens {tokens.shape}, {mask.sum():,} of them real")
    print(f"jax imported: {'jax' in sys.modules}")


def load(index: int, lengths: np.ndarray) -> dict[str, np.ndarray]:
    """Returns an example. Yours would come from a file."""
    rng = np.random.default_rng(index)
    return {"tokens": rng.integers(0, 50_000, lengths[index], dtype=np.int64)}


if __name__ == "__main__":
    main()
