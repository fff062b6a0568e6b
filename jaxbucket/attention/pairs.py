"""Which keys the queries of packed rows attend to, and how pairs are weighted."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Pairs(NamedTuple):
    """The pairs of a query and a key within a segment, and the scale of their logits.

    Attributes:
      before: the number of keys before its own position that a query attends to; None
        for all of its segment.
      after: the same after its own position, 0 for causal attention.
      scale: the factor of the logits.
      soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`, unless it is None.
    """

    before: int | None
    after: int | None
    scale: float
    soft_cap: float | None = None

    def key_span(self, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the positions of the first and the last key of each query.

        Segments are contiguous, so these are all keys between the two. A query in
        padding has only its own key.

        Args:
          ids: `[B, T]` int, the segment ids.

        Returns:
          Two arrays `[B, T]` int32.
        """
        positions = jnp.arange(ids.shape[1], dtype=jnp.int32)
        edge = jnp.ones((len(ids), 1), bool)
        is_new = ids[:, 1:] != ids[:, :-1]
        first = jnp.where(jnp.concatenate([edge, is_new], 1), positions, 0)
        first = lax.cummax(first, axis=1)
        last = jnp.where(jnp.concatenate([is_new, edge], 1), positions, ids.shape[1])
        last = lax.cummin(last, axis=1, reverse=True)
        if self.before is not None:
            first = jnp.maximum(first, positions - self.before)
        if self.after is not None:
            last = jnp.minimum(last, positions + self.after)
        is_real = ids > 0
        return jnp.where(is_real, first, positions), jnp.where(is_real, last, positions)
