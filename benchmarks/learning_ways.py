"""The ways to batch and to update that `learning.py` compares.

The name of a way is that of a way to batch, and perhaps, after a comma, that of a way
to update: "spread", "packed, no clipping".
"""

import argparse
import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from transformer import VOCABULARY

import jaxbucket as jb

# The ways that are trained by default.
WAYS = (
    *("packed", "packed with mixing", "2 packed with mixing", "padded"),
    *("shuffled, sqrt of examples", "shuffled", "spread", "spread, sqrt of tokens"),
    *("2 shuffled", "2 spread", "4 spread"),
)
# Micro-batches have more padding, so they need more than their part of the tokens.
_SHARES = np.linspace(1, 1.3, 31)
_BATCHES = {x.partition(", ")[0] for x in WAYS}
_UPDATES = {
    *("", "sqrt of examples", "sqrt of mean examples", "sqrt of tokens"),
    *("no clipping", "clipping by bucket", "long warm-up", "slow second moments"),
}
# (seed=...) -> schedule
Schedules = Callable[..., jb.BatchSchedule]


def check_ways(ways: Iterable[str]) -> None:
    """Exits if the name of a way is unknown, or its parts do not fit each other."""
    for way in ways:
        batches, _, update = way.partition(", ")
        if batches not in _BATCHES or update not in _UPDATES:
            sys.exit(f"Unknown way: {way}. See the docstring of `learning.py`.")
        if update == "clipping by bucket" and batches[0].isdigit():
            sys.exit(f"{way}: an update with several buckets cannot be clipped by one.")


class BatchWays:
    """Schedules with nearly the same mean number of real tokens per update.

    Attributes:
      plan: the buckets of batches with one example in each row.
      tokens_per_step: the mean number of real tokens of an update.
      examples_per_step: the mean number of examples of an update.
      base_examples: the number of examples for which the square roots of all batches,
        relative to it, have the mean 1 over tokens.
    """

    def __init__(self, args: argparse.Namespace, lengths: np.ndarray):
        self.args = args
        self.lengths = lengths
        self.plan = self._plan(args.max_tokens)
        epoch = jb.report(self.plan, lengths)
        self.tokens_per_step = epoch.real_tokens / epoch.steps_per_epoch
        self.examples_per_step = epoch.examples / epoch.steps_per_epoch
        self.base_examples = self._base_examples()

    def __getitem__(self, name: str) -> Schedules:
        """Returns the schedules of a way to batch, by its name."""
        return {
            "packed": self._packed,
            "packed with mixing": functools.partial(self._planned_rows, 1),
            "2 packed with mixing": functools.partial(self._planned_rows, 2),
            "padded": self._padded,
            "shuffled": functools.partial(self._bucketed, 1, "shuffled"),
            "spread": functools.partial(self._bucketed, 1, "spread"),
            "2 shuffled": functools.partial(self._bucketed, 2, "shuffled"),
            "2 spread": functools.partial(self._bucketed, 2, "spread"),
            "4 spread": functools.partial(self._bucketed, 4, "spread"),
        }[name]()

    def _plan(self, max_tokens: int) -> jb.BucketPlan:
        return jb.plan_buckets(
            self.lengths,
            max_tokens=max_tokens,
            num_buckets=self.args.num_buckets,
            seq_len_multiple=32,
            max_seq_len=self.args.max_len,
        )

    def _base_examples(self) -> float:
        schedule = jb.BatchSchedule(self.plan, self.lengths)
        batches = [batch.rows[batch.rows >= 0] for batch in schedule]
        tokens = np.array([self.lengths[rows].sum() for rows in batches])
        sizes = np.array([len(rows) for rows in batches])
        return float(tokens @ np.sqrt(sizes) / tokens.sum()) ** 2

    def _packed(self) -> Schedules:
        """Rows that are as long as it takes to have the same tokens per update."""
        num_rows = self._num_rows(self.tokens_per_step)
        seq_len = round(self.tokens_per_step / num_rows / 32) * 32
        packing = jb.packing.pack(self.lengths, seq_len)
        plan = jb.BucketPlan.from_shapes([(num_rows, seq_len)])
        return functools.partial(jb.BatchSchedule, plan, self.lengths, packing=packing)

    def _planned_rows(self, count: int) -> Schedules:
        """Rows of `plan_packing`, whose T and mixing of lengths have its defaults."""

        def rows_of(max_tokens: int) -> Schedules:
            chosen = jb.plan_packing(
                self.lengths,
                max_tokens=max_tokens,
                max_seq_len=max_tokens // self._num_rows(max_tokens) // 32 * 32,
                num_buckets=self.args.num_buckets,
                seq_len_multiple=32,
                cost_fn=jb.plan.TransformerCost(
                    self.args.width, self.args.layers, VOCABULARY
                ),
                block_sparse=True,
            )
            return self._micro_batches(chosen.plan, count, packing=chosen.packing)

        shares = np.array([1, 1.01, 1.03, 1.06, 1.1, 1.15, 1.2, 1.3])
        sizes = np.rint(shares * self.tokens_per_step / count).astype(int)
        # A row must hold the longest example.
        return self._closest(rows_of, np.maximum(sizes, self.args.max_len).tolist())

    def _num_rows(self, max_tokens: float) -> int:
        """Returns the number of rows if each has room for the longest example."""
        return max(1, int(max_tokens) // self.args.max_len)

    def _padded(self) -> Schedules:
        size = max(1, round(self.examples_per_step))
        plan = jb.BucketPlan.from_shapes([(size, self.args.max_len)])
        return functools.partial(jb.BatchSchedule, plan, self.lengths)

    def _bucketed(self, count: int, order: str) -> Schedules:
        def batches_of(max_tokens: int) -> Schedules:
            return self._micro_batches(self._plan(max_tokens), count, order=order)

        if count == 1:
            return batches_of(self.args.max_tokens)
        size = self.args.max_tokens // count
        return self._closest(batches_of, [round(x * size) for x in _SHARES])

    def _micro_batches(
        self, plan: jb.BucketPlan, count: int, **options: Any
    ) -> Schedules:
        options |= {"accumulate": count, "group": "mixed"}
        return functools.partial(jb.BatchSchedule, plan, self.lengths, **options)

    def _closest(self, make: Callable[[int], Schedules], sizes: list[int]) -> Schedules:
        """Returns schedules whose updates have the mean number of tokens, or nearly."""

        def difference(schedules: Schedules) -> float:
            return abs(self.lengths.sum() / len(schedules()) - self.tokens_per_step)

        return min(map(make, sizes), key=difference)


def update_options(way: str, args: argparse.Namespace, ways: BatchWays) -> dict:
    """Returns the options of `optimizer` for a way, which may name a way to update."""
    _, _, name = way.partition(", ")
    tokens = {"base_tokens": ways.tokens_per_step}
    return {
        "": {},
        "sqrt of examples": {"base": {"base_examples": ways.base_examples}},
        "sqrt of mean examples": {"base": {"base_examples": ways.examples_per_step}},
        "sqrt of tokens": {"base": tokens},
        "no clipping": {"clip": optax.identity()},
        "clipping by bucket": {
            "clip": clip_by_bucket(args.clip, int(ways.plan.batch_sizes.max()))
        },
        "long warm-up": {"warmup_steps": 4 * args.warmup_steps},
        "slow second moments": {"b2": 1 - (1 - args.b2) / 10},
    }[name]


def optimizer(
    args: argparse.Namespace,
    ways: BatchWays,
    *,
    base: dict[str, float] | None = None,
    clip: optax.GradientTransformation | None = None,
    warmup_steps: int | None = None,
    b2: float | None = None,
) -> optax.GradientTransformation:
    """Returns AdamW, whose learning rate follows the number of real tokens so far.

    Args:
      args: the options of the benchmark, which apply unless another one is given.
      ways: the ways to batch.
      base: the size of the batch for the square root rule; without it, the learning
        rate does not depend on the size.
      clip: clips gradients.
      warmup_steps: updates until the peak of the learning rate. It falls with the
        inverse square root of tokens from there, so a later peak makes later rates
        higher.
      b2: the decay of the second moments.
    """
    warmup = round((warmup_steps or args.warmup_steps) * ways.tokens_per_step)
    curve = jb.optim.warmup_inverse_sqrt_schedule(args.lr, warmup)
    rate = jb.scale_schedule(
        jb.optim.schedule_by_work(curve, "tokens"),
        **(base or {"base_tokens": ways.tokens_per_step}),
        rule="sqrt" if base else "none",
    )
    adam = optax.inject_hyperparams(optax.adamw)
    return optax.chain(
        clip or optax.clip_by_global_norm(args.clip),
        adam(learning_rate=rate, b1=args.b1, b2=b2 or args.b2, weight_decay=0.05),
    )


class _MeanNorms(NamedTuple):
    """Running means of the norms of gradients.

    Attributes:
      by_size: `[max_size + 1]`, the mean norm by the number of rows; 0 if not seen.
      overall: `[]`, the mean norm of all gradients.
    """

    by_size: jax.Array
    overall: jax.Array


def clip_by_bucket(
    max_norm: float, max_size: int, decay: float = 0.98
) -> optax.GradientTransformation:
    """Clips to `max_norm`, multiplied by the mean norm of a bucket relative to all.

    Buckets are told apart by their number of rows, so micro-batches of several buckets
    are not supported.
    """

    def init(params: Any) -> _MeanNorms:
        return _MeanNorms(jnp.zeros(max_size + 1), jnp.zeros(()))

    def update(
        updates: Any, state: Any, params: Any = None, **batch: Any
    ) -> tuple[Any, _MeanNorms]:
        norm = optax.tree.norm(updates)

        def mean(old: jax.Array) -> jax.Array:
            return jnp.where(old == 0, norm, decay * old + (1 - decay) * norm)

        size = jnp.asarray(batch["num_rows"], jnp.int32)
        bucket, overall = mean(state.by_size[size]), mean(state.overall)
        limit = max_norm * bucket / jnp.where(overall == 0, 1, overall)
        factor = jnp.where(norm > limit, limit / norm, 1)
        clipped = jax.tree.map(lambda x: x * factor.astype(x.dtype), updates)
        return clipped, _MeanNorms(state.by_size.at[size].set(bucket), overall)

    return optax.GradientTransformationExtraArgs(init, update)
