"""Refuses layers of Flax that would normalize by the rows of each device."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from flax import linen, nnx

from jaxbucket.base.batch import Batch
from jaxbucket.train.loss import LossFn, Mode


def without_local_batch_norm(
    loss_fn: LossFn, mode: Mode, axes: Sequence[str]
) -> LossFn:
    """Returns a loss that raises a ValueError if Flax's `BatchNorm` updates statistics.

    Flax's layers compute statistics of the rows that they are given. If these are the
    rows of one device, results depend on the number of devices. Layers whose
    `axis_name` has all axes of the batch compute those of all rows.

    Args:
      loss_fn: the loss function.
      mode: the mode of the step.
      axes: the axes of the mesh over which rows are distributed.
    """

    def checked(model: Any, batch: Batch, keys: jax.Array | None) -> tuple:
        with linen.intercept_methods(check_linen), _checked_layers(model, check_nnx):
            return loss_fn(model, batch, keys)

    def check_linen(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        layer = context.module
        if type(layer).__call__ is linen.BatchNorm.__call__:
            uses_averages = layer.use_running_average
            if uses_averages is None:
                uses_averages = _argument(args, kwargs)
            check(layer, uses_averages, "linen.BatchNorm", "LinenBatchNorm")
        return next_fun(*args, **kwargs)

    def check_nnx(layer: nnx.BatchNorm, args: Any, kwargs: Any) -> None:
        uses_averages = _argument(args, kwargs)
        if uses_averages is None:
            uses_averages = layer.use_running_average
        check(layer, uses_averages, "nnx.BatchNorm", "NnxBatchNorm")

    def check(layer: Any, uses_averages: Any, name: str, ours: str) -> None:
        # Only under `shard_map` do the axes have names.
        is_global = mode == "shard_map" and _covers(layer, axes)
        if not (uses_averages or is_global):
            raise _error(name, ours, mode)

    return checked


def _argument(args: tuple, kwargs: dict[str, Any]) -> Any:
    """Returns `use_running_average` of a call, by default None."""
    return kwargs.get("use_running_average", (*args, None, None)[1])


def _covers(layer: Any, axes: Sequence[str]) -> bool:
    """Returns whether a layer computes the statistics of all devices."""
    names = layer.axis_name
    names = (names,) if isinstance(names, str) else names or ()
    return layer.axis_index_groups is None and {*axes} <= {*names}


@contextmanager
def _checked_layers(model: Any, check: Any) -> Iterator[None]:
    """Calls a function before each call of an `nnx.BatchNorm` of a model.

    The class of the layers is replaced for a while, because `nnx.remat` and others
    copy layers, but preserve their class.
    """
    layers = _nnx_layers(model)
    classes = [type(layer) for layer in layers]
    make = functools.cache(lambda base: _checked_class(base, check))
    try:
        for layer in layers:
            layer.__class__ = make(type(layer))
        yield
    finally:
        for layer, base in zip(layers, classes, strict=True):
            layer.__class__ = base


def _checked_class(base: type[nnx.BatchNorm], check: Any) -> type[nnx.BatchNorm]:
    class Checked(base):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            check(self, args, kwargs)
            return super().__call__(*args, **kwargs)

    return Checked


def _nnx_layers(model: Any) -> list[nnx.BatchNorm]:
    if not isinstance(model, nnx.Module):
        return []
    nodes = [node for _, node in nnx.iter_graph(model)]
    layers = [node for node in nodes if isinstance(node, nnx.BatchNorm)]
    # Subclasses may have statistics of their own.
    return [x for x in layers if type(x).__call__ is nnx.BatchNorm.__call__]


def _error(layer: str, ours: str, mode: Mode) -> ValueError:
    return ValueError(
        f"`loss_fn` uses `{layer}`, whose statistics are those of the rows of one "
        f"device with `mode={mode!r}`. Use `jb.layers.{ours}`, which has the same "
        "parameters, or `mode='jit'`."
    )
