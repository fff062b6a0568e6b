"""A decoder-only transformer over bytes, in Flax NNX."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

import jaxbucket as jb

VOCABULARY = 257
# The input token from which the first byte is predicted.
BEGIN = 256


class Transformer(nnx.Module):
    """Bytes `[B, T]` -> logits `[B, T, 257]` of the byte that follows each."""

    def __init__(
        self,
        width: int,
        layers: int,
        dropout: float,
        rngs: nnx.Rngs,
        dtype: jax.typing.DTypeLike | None = None,
    ):
        """Parameters are float32; `dtype` is that of the computation."""
        self.embed = nnx.Embed(VOCABULARY, width, dtype=dtype, rngs=rngs)
        blocks = (Block(width, dropout, rngs, dtype=dtype) for _ in range(layers))
        self.blocks = nnx.List(blocks)
        self.norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(
            width, VOCABULARY, use_bias=False, dtype=dtype, rngs=rngs
        )

    def __call__(
        self,
        inputs: jax.Array,
        positions: jax.Array,
        keys: jax.Array | None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the logits.

        Args:
          inputs: `[B, T]` int32, bytes or `BEGIN`, from `jb.next_tokens`.
          positions: `[B, T]` int32.
          keys: `[B]` random keys for dropout, or None for no dropout.
          segment_ids: `[B, T]` int32, 0 for padding. Attention stays within a
            segment. None if each row has one document.
        """
        x = self.embed(inputs)
        for layer, block in enumerate(self.blocks):
            x = block(x, positions, fold_in(keys, layer), segment_ids)
        return self.head(self.norm(x))


class Block(nnx.Module):
    """Causal self-attention, then a two-layer network at every position."""

    def __init__(
        self,
        width: int,
        dropout: float,
        rngs: nnx.Rngs,
        head_dim: int = 64,
        dtype: jax.typing.DTypeLike | None = None,
    ):
        # About one head per `head_dim`, each of an even width for the rotation.
        counts = range(max(1, width // head_dim), 0, -1)
        self.heads = next(heads for heads in counts if width % (2 * heads) == 0)
        linear = functools.partial(nnx.Linear, dtype=dtype, rngs=rngs)
        norms = (nnx.RMSNorm(width, dtype=dtype, rngs=rngs) for _ in range(2))
        self.norms = nnx.List(norms)
        self.qkv = linear(width, 3 * width, use_bias=False)
        self.out = linear(width, width, use_bias=False)
        self.up = linear(width, 4 * width)
        self.down = linear(4 * width, width)
        self.dropout = nnx.Dropout(dropout)

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        keys: jax.Array | None,
        segment_ids: jax.Array | None,
    ) -> jax.Array:
        y = self._attend(self.norms[0](x), positions, segment_ids)
        x = x + self._drop(y, fold_in(keys, 0))
        hidden = nnx.gelu(self.up(self.norms[1](x)))
        return x + self._drop(self.down(hidden), fold_in(keys, 1))

    def _attend(
        self, x: jax.Array, positions: jax.Array, segment_ids: jax.Array | None
    ) -> jax.Array:
        q, k, v = jnp.split(self.qkv(x), 3, axis=-1)
        split = (*x.shape[:2], self.heads, x.shape[-1] // self.heads)
        q, k = (rotate(a.reshape(split), positions) for a in (q, k))
        v = v.reshape(split)
        if segment_ids is None:
            # Padding follows all real tokens, so a causal mask suffices.
            y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        else:
            y = jb.segment_attention(q, k, v, segment_ids, is_causal=True)
        return self.out(y.reshape(x.shape))

    def _drop(self, x: jax.Array, keys: jax.Array | None) -> jax.Array:
        if keys is None or self.dropout.rate == 0:
            return x
        # Each row has its own key, so its dropout mask is the same on any mesh.
        return jax.vmap(lambda row, key: self.dropout(row, rngs=key))(x, keys)


def fold_in(keys: jax.Array | None, index: int) -> jax.Array | None:
    """Returns other keys `[B]` for each index, so that no two layers share a mask."""
    fold = jax.vmap(jax.random.fold_in, (0, None))
    return None if keys is None else fold(keys, index)


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Applies rotary positions (arXiv:2104.09864) to `[B, T, heads, dim]`."""
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    a, b = x[..., :half], x[..., half:]
    rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return rotated.astype(x.dtype)
