"""Variables whose gradients are their new values: the scales of layers in fp8.

The backward pass of these layers returns new scales as gradients, because some of them
depend on the gradients of activations, which the forward pass does not know. Flax keeps
them in a collection of their own, and replaces them by their gradients (`TrainState`).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jaxbucket.train.global_rows import current_rows
from jaxbucket.train.variables import Values, is_overwritten, leaves_with_kind


def overwritten_values(variables: Any) -> Values:
    """Returns the variables whose gradients are their new values, by path."""
    return {
        path: value
        for path, kind, value in leaves_with_kind(variables)
        if is_overwritten(kind)
    }


def combine_overwritten(old: Values, grads: Values) -> Values:
    """Returns the new values, equal on all devices, given the gradients on each.

    They are maxima of absolute values, or computed from maxima of earlier batches.
    """
    new = current_rows().max_over_rows(grads)
    return {
        # If a layer was not called, the gradients of its scales are zero.
        path: jnp.where(jnp.any(value != 0), value, old[path])
        for path, value in new.items()
    }
