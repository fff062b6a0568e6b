"""Refuses layers of Flax that would normalize by the rows of each device."""

from __future__ import annotations

import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from flax import linen, nnx
from jax.sharding import Mesh

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
    batch compute those of all rows, and running averages are the same everywhere.

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
    def checked(*args: Any) -> Any:
        with linen.intercept_methods(check_linen), _checked_nnx(check):
            return function(*args)

    def check_linen(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        layer, method = context.module, getattr(context.orig_method, "func", None)
        # Subclasses may call the method of Flax, or compute statistics of their own.
        if method is inspect.unwrap(linen.BatchNorm.__call__):
            uses_averages = layer.use_running_average
            if uses_averages is None:
                uses_averages = _argument(args, kwargs)
            check(layer, uses_averages, "linen.BatchNorm", "LinenBatchNorm")
        return next_fun(*args, **kwargs)

    def check(layer: Any, uses_averages: Any, name: str, ours: str) -> None:
        # Only under `shard_map` do the axes have names.
        is_global = mode == "shard_map" and _covers(layer, spread)
        if not (uses_averages or is_global):
            raise ValueError(
                f"`{argument}` uses `{name}`, whose statistics are those of the rows "
                f"of one device with `mode={mode!r}`. Use `jb.layers.{ours}`, which "
                "has the same parameters, or `mode='jit'`."
            )

    return checked


def _argument(args: tuple, kwargs: dict[str, Any]) -> Any:
    """Returns `use_running_average` of a call, by default None."""
    return kwargs.get("use_running_average", (*args, None, None)[1])


def _covers(layer: Any, axes: set[str]) -> bool:
    """Returns whether a layer computes the statistics of all devices."""
    names = layer.axis_name
    names = (names,) if isinstance(names, str) else names or ()
    return layer.axis_index_groups is None and axes <= {*names}


_Check = Callable[[Any, Any, str, str], None]
_nnx_check: contextvars.ContextVar[_Check | None] = contextvars.ContextVar(
    "_nnx_check", default=None
)


@contextmanager
def _checked_nnx(check: _Check) -> Iterator[None]:
    """Calls a function before each call of `nnx.BatchNorm` in this thread."""
    _make_nnx_checkable()
    token = _nnx_check.set(check)
    try:
        yield
    finally:
        _nnx_check.reset(token)


@functools.cache
def _make_nnx_checkable() -> None:
    """Replaces the method of `nnx.BatchNorm`, because NNX has no interceptors."""
    call = nnx.BatchNorm.__call__

    @functools.wraps(call)
    def checkable(self: nnx.BatchNorm, *args: Any, **kwargs: Any) -> Any:
        if check := _nnx_check.get():
            uses_averages = _argument(args, kwargs)
            if uses_averages is None:
                uses_averages = self.use_running_average
            check(self, uses_averages, "nnx.BatchNorm", "NnxBatchNorm")
        return call(self, *args, **kwargs)

    nnx.BatchNorm.__call__ = checkable
