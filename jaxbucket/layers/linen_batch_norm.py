"""Batch normalization for Linen modules, over real positions and all devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen

from jaxbucket.layers.statistics import (
    check_axes,
    masked_statistics,
    moving_averages,
    normalized,
)
from jaxbucket.optim.precision import widest


class LinenBatchNorm(linen.BatchNorm):
    """`linen.BatchNorm` whose statistics are those of all real positions of a batch.

    Unlike with Flax's layer, statistics do not depend on the mode of the step, nor on
    how rows are distributed over devices; padding never counts. (With `mode="jit"`,
    `linen.BatchNorm` with `mask=` has the same statistics.) The options are those of
    `linen.BatchNorm`, except `axis_name` and `axis_index_groups`, and there is
    one feature axis. Parameters and
    variables have the same names, so checkpoints can be exchanged, with
    `name="BatchNorm_0"` if the name of the layer comes from its class.

    Example:
      >>> norm = LinenBatchNorm(momentum=0.5, use_running_average=False)
      >>> x, mask = jnp.array([[[1.0], [3.0], [9.0]]]), jnp.array([[1, 1, 0]])
      >>> variables = norm.init(jax.random.key(0), x)
      >>> y, new = norm.apply(variables, x, mask=mask, mutable=["batch_stats"])
      >>> y[0, :2, 0].round(3).tolist(), new["batch_stats"]["mean"].tolist()
      ([-1.0, 1.0], [1.0])
    """

    @linen.compact
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
            the statistics of the batch, unless the layer says so.
          mask: `[B, ...]`, whether a position is real, such as `batch.mask`.
        """
        check_axes(self.axis, self.axis_name, self.axis_index_groups)
        use_running_average = linen.merge_param(
            "use_running_average", self.use_running_average, use_running_average
        )
        shape = (x.shape[self.axis],)
        dtype = widest(jnp.float32, self.param_dtype)
        mean = self.variable("batch_stats", "mean", jnp.zeros, shape, dtype)
        var = self.variable("batch_stats", "var", jnp.ones, shape, dtype)
        scale = bias = None
        if self.use_scale:
            scale = self.param("scale", self.scale_init, shape, self.param_dtype)
        if self.use_bias:
            bias = self.param("bias", self.bias_init, shape, self.param_dtype)
        if use_running_average:
            batch_mean, batch_var = mean.value, var.value
        else:
            statistics = masked_statistics(x, mask, axis=self.axis)
            batch_mean, batch_var, _ = statistics
            if not self.is_initializing():
                averages = moving_averages(
                    mean.value, var.value, statistics, self.momentum
                )
                mean.value, var.value = averages
        return normalized(
            x,
            batch_mean,
            batch_var,
            scale,
            bias,
            epsilon=self.epsilon,
            axis=self.axis,
            dtype=self.dtype,
        )
