"""Batch normalization for NNX models, over real positions and all devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxbucket.layers.statistics import (
    check_axes,
    masked_statistics,
    moving_averages,
    normalized,
)
from jaxbucket.optim.precision import widest


class NnxBatchNorm(nnx.BatchNorm):
    """`nnx.BatchNorm` whose statistics are those of all real positions of a batch.

    Unlike with Flax's layer, statistics do not depend on the mode of the step, nor on
    how rows are distributed over devices; padding never counts. (With
    `mode="jit"`, `nnx.BatchNorm` with `mask=` has the same statistics.) Variables and
    parameters have the same names, so checkpoints can be exchanged.

    Example:
      >>> norm = NnxBatchNorm(1, momentum=0.5, rngs=nnx.Rngs(0))
      >>> x, mask = jnp.array([[[1.0], [3.0], [9.0]]]), jnp.array([[1, 1, 0]])
      >>> norm(x, mask=mask)[0, :2, 0].round(3).tolist(), norm.mean[...].tolist()
      ([-1.0, 1.0], [1.0])

    Args:
      num_features: the size F of the feature axis.
      **options: the options of `nnx.BatchNorm`, except `axis_name` and
        `axis_index_groups`.
    """

    def __init__(self, num_features: int, **options: Any):
        super().__init__(num_features, **options)
        check_axes(self.axis, self.axis_name, self.axis_index_groups)
        dtype = widest(jnp.float32, self.param_dtype)
        self.mean = nnx.BatchStat(jnp.zeros(num_features, dtype))
        self.var = nnx.BatchStat(jnp.ones(num_features, dtype))

    def __call__(
        self,
        x: jax.Array,
        use_running_average: bool | None = None,
        *,
        mask: jax.Array | None = None,
    ) -> jax.Array:
        """Normalizes features.

        Args:
          x: `[B, ..., F]`.
          use_running_average: whether to normalize by the running averages instead of
            the statistics of the batch; by default as set by `model.train()` and
            `model.eval()`.
          mask: `[B, ...]`, whether a position is real, such as `batch.mask`.
        """
        if use_running_average is None:
            use_running_average = self.use_running_average
        mean, var = self.mean[...], self.var[...]
        if not use_running_average:
            statistics = masked_statistics(x, mask, axis=self.axis)
            self.mean[...], self.var[...] = moving_averages(
                mean, var, statistics, self.momentum
            )
            mean, var, _ = statistics
        return normalized(
            x,
            mean,
            var,
            None if self.scale is None else self.scale[...],
            None if self.bias is None else self.bias[...],
            epsilon=self.epsilon,
            axis=self.axis,
            dtype=self.dtype,
        )
