"""Refuses layers of Flax that would normalize by the rows of each device."""

from __future__ import annotations

from typing import Any

import jax
from flax import linen, nnx

from jaxbucket.base.batch import Batch
from jaxbucket.train.loss import LossFn, Mode


def without_local_batch_norm(loss_fn: LossFn, mode: Mode) -> LossFn:
    """Returns a loss that raises a ValueError if Flax's `BatchNorm` updates statistics.

    Flax's layers compute statistics of the rows that they are given. If these are the
    rows of one device, results depend on the number of devices.
    """

    def checked(model: Any, batch: Batch, keys: jax.Array | None) -> tuple:
        layers = _nnx_layers(model)
        before = [_mean(layer) for layer in layers]
        with linen.intercept_methods(check_linen):
            result = loss_fn(model, batch, keys)
        for layer, mean in zip(layers, before, strict=True):
            # Under `nnx.remat`, a mean that is only passed on is another tracer, too.
            if _mean(layer) is not mean and not layer.use_running_average:
                raise _error("nnx.BatchNorm", "NnxBatchNorm", mode)
        return result

    def check_linen(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        layer = context.module
        if type(layer).__call__ is linen.BatchNorm.__call__:
            uses_averages = layer.use_running_average
            if uses_averages is None:
                uses_averages = kwargs.get(
                    "use_running_average", (*args, None, None)[1]
                )
            if not uses_averages:
                raise _error("linen.BatchNorm", "LinenBatchNorm", mode)
        return next_fun(*args, **kwargs)

    return checked


def _nnx_layers(model: Any) -> list[nnx.BatchNorm]:
    if not isinstance(model, nnx.Module):
        return []
    nodes = [node for _, node in nnx.iter_graph(model)]
    layers = [node for node in nodes if isinstance(node, nnx.BatchNorm)]
    # Subclasses may have statistics of their own.
    return [x for x in layers if type(x).__call__ is nnx.BatchNorm.__call__]


def _mean(layer: nnx.BatchNorm) -> Any:
    (mean,) = jax.tree.leaves(layer.mean)
    return mean


def _error(layer: str, ours: str, mode: Mode) -> ValueError:
    return ValueError(
        f"`loss_fn` uses `{layer}`, whose statistics are those of the rows of one "
        f"device with `mode={mode!r}`. Use `jb.layers.{ours}`, which has the same "
        "parameters, or `mode='jit'`."
    )
