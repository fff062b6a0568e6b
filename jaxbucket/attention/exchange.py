"""Attention over rows that are divided over devices, by exchanging heads for tokens.

Each device sends the tokens that it has of a row to all devices of the row, and gets
whole rows for its share of the heads ("Ulysses", Jacobs et al., arXiv:2309.14509). The
attention itself stays as it is. Each device sends and receives as many bytes as it has.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxbucket.attention.row_layout import RowLayout, explicit_layout, row_layout

Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def exchange_heads(attend: Attend) -> Attend:
    """Returns attention that runs on whole rows, on each device for its own rows.

    In a step of mode "jit" from `make_train_step`, `make_eval_step` or
    `make_predict_step`, `attend` is called inside of a `jax.shard_map`, with the whole
    rows of a device. If rows are cut, it is called with a share of the heads. Anywhere
    else, it is called with all rows and heads. `segment_attention` is made this way.

    Example:
      >>> @exchange_heads
      ... def attend(query, key, value, segment_ids):
      ...     mask = jb.attention.attention_mask(segment_ids)
      ...     return jax.nn.dot_product_attention(query, key, value, mask=mask)
      >>> import jaxbucket as jb
      >>> x = jnp.ones((1, 4, 2, 8))
      >>> attend(x, x, x, jnp.array([[1, 1, 2, 0]])).shape
      (1, 4, 2, 8)

    Args:
      attend: `(query, key, value, segment_ids) -> output`, with arrays `[b, T, n, H]`,
        `[b, T, k, H]`, `[b, T, k, H]` and `[b, T]`, and an output `[b, T, n, H]`. It
        may use other arrays, which must be equal on all devices and the same for all
        heads: it does not know which heads it is given. Neither does a random key, so
        that dropout would repeat its mask for every share of the heads.

    Returns:
      A function of the same arrays for the whole batch, `[B, T, N, H]`,
      `[B, T, K, H]`, `[B, T, K, H]` and `[B, T]`. When called, it raises a ValueError
      if a row is on several devices whose number does not divide N. Key heads are
      repeated where that number does not divide K.
    """

    @functools.wraps(attend)
    def over_devices(
        query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array
    ) -> jax.Array:
        layout: RowLayout | None = explicit_layout(query) or row_layout.value
        if layout is None or not _divides(layout, query.shape):
            return attend(query, key, value, segment_ids)
        tokens = PartitionSpec(layout.rows, layout.columns)
        heads = PartitionSpec(layout.rows, layout.columns, layout.heads)
        return jax.shard_map(
            functools.partial(_of_device, attend, layout.columns),
            mesh=layout.mesh,
            in_specs=(heads, heads, heads, tokens),
            out_specs=heads,
            axis_names={*layout.rows, *layout.columns, *layout.heads},
            check_vma=False,
        )(query, key, value, segment_ids)

    return over_devices


def _of_device(
    attend: Attend,
    columns: tuple[str, ...],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array,
) -> jax.Array:
    """Returns the output for the tokens of one device."""
    if not columns:
        return attend(query, key, value, segment_ids)
    cuts = jax.lax.axis_size(columns)
    if query.shape[2] % cuts:
        raise ValueError(
            f"`query` has {query.shape[2]} heads, which {cuts} devices per row cannot "
            "share. Let a row have fewer devices (`data_mesh(max_row_shards=)`), or "
            f"use a multiple of {cuts} heads."
        )
    repeats = cuts // math.gcd(cuts, key.shape[2])
    key, value = (jnp.repeat(x, repeats, axis=2) for x in (key, value))

    def whole_rows(x: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(x, columns, split_axis=2, concat_axis=1, tiled=True)

    ids = jax.lax.all_gather(segment_ids, columns, axis=1, tiled=True)
    output = attend(whole_rows(query), whole_rows(key), whole_rows(value), ids)
    return jax.lax.all_to_all(output, columns, split_axis=1, concat_axis=2, tiled=True)


def _divides(layout: RowLayout, shape: tuple[int, ...]) -> bool:
    """Returns whether arrays `[B, T, ...]` are divided as the rows of the batch.

    A model may also attend to other arrays, such as a shorter latent sequence, or
    inside of a `jax.shard_map` of its own.
    """
    num_shards = math.prod(layout.mesh.shape[name] for name in layout.rows)
    is_whole = shape[0] % num_shards == 0
    is_inside = bool(jax.sharding.get_abstract_mesh().manual_axes)
    return is_whole and shape[1] % layout.num_cuts == 0 and not is_inside
