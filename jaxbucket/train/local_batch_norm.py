"""Refuses layers of Flax that would normalize by the rows of each device."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from flax import linen, nnx
from jax.sharding import Mesh

from jaxbucket.train.forwarding import are_forwarded
from jaxbucket.train.loss import Mode


def without_local_batch_norm(
    function: Callable[..., Any],
    mesh: Mesh,
    mode: Mode,
    axes: Sequence[str],
    argument: str = "loss_fn",
) -> Callable[..., Any]:
    """Returns a function that raises a ValueError if it normalizes rows of one device.

    Flax's `BatchNorm` computes statistics of the rows that it is given, so results
    would depend on the number of devices. Layers whose `axis_name` has all axes of the
    batch compute those of all rows, and running averages are the same everywhere. Calls
    of Linen modules are looked at, and whether a call changes the running averages of
    an NNX model. NNX layers that the function makes or copies are not seen, and those
    with a `__call__` of their own are trusted.

    Args:
      function: a function of the user that calls the model.
      mesh: the mesh on which rows are distributed.
      mode: the mode of the step.
      axes: the axes of the mesh over which rows are distributed.
      argument: the name of the function, for messages.
    """
    spread = {axis for axis in axes if mesh.shape[axis] > 1}
    if mode == "jit" or not spread:
        return function

    @functools.wraps(function)
    def checked(model: Any, *args: Any) -> Any:
        if isinstance(model, nnx.Module) and _nnx_layers(model):
            # Flags say less, because calls may have others, or change them.
            uses_averages = are_forwarded(
                lambda means: _means_after(function, model, args, means),
                [layer.mean[...] for layer in _nnx_layers(model)],
            )
            for layer, uses in zip(_nnx_layers(model), uses_averages, strict=True):
                check(layer, uses, "nnx.BatchNorm", "NnxBatchNorm")
        with linen.intercept_methods(check_linen):
            return function(model, *args)

    def check_linen(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        layer, method = context.module, getattr(context.orig_method, "func", None)
        # Subclasses may call the method of Flax, or compute statistics of their own.
        if method is inspect.unwrap(linen.BatchNorm.__call__):
            # Either the layer or the call says it.
            uses_averages = layer.use_running_average
            if uses_averages is None:
                uses_averages = kwargs.get(
                    "use_running_average", (*args, None, None)[1]
                )
            check(layer, uses_averages, "linen.BatchNorm", "LinenBatchNorm")
        return next_fun(*args, **kwargs)

    def check(layer: Any, uses_averages: Any, name: str, ours: str) -> None:
        # Only under `shard_map` do the axes have names.
        is_global = mode == "shard_map" and _covers(layer, spread)
        if not (uses_averages or is_global):
            raise ValueError(
                f"`{argument}` uses `{name}`, whose statistics are those of the rows "
                f"of one device with `mode={mode!r}`. Use `jb.layers.{ours}`, which "
                "has the same parameters, `mode='jit'`, or a layer with "
                "`use_running_average=True`."
            )

    return checked


def _nnx_layers(model: nnx.Module) -> list[nnx.BatchNorm]:
    """Returns the layers of a model that Flax's own method normalizes."""
    return [
        layer
        for _, layer in nnx.iter_graph(model)
        if isinstance(layer, nnx.BatchNorm)
        and type(layer).__call__ is nnx.BatchNorm.__call__
    ]


def _means_after(
    function: Callable[..., Any], model: nnx.Module, args: Any, means: Sequence[Any]
) -> list[Any]:
    """Returns the running means after a call of a copy of a model with given ones."""
    copy = nnx.clone(model)
    layers = _nnx_layers(copy)
    for layer, mean in zip(layers, means, strict=True):
        layer.mean[...] = mean
    function(copy, *args)
    return [layer.mean[...] for layer in layers]


def _covers(layer: Any, axes: set[str]) -> bool:
    """Returns whether a layer computes the statistics of all devices."""
    names = layer.axis_name
    names = (names,) if isinstance(names, str) else names or ()
    return layer.axis_index_groups is None and axes <= {*names}
