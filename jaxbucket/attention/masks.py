"""What attention and losses need of packed rows, inside of jit.

All of it is derived from segment ids (0 is padding, then 1, 2, ...) and positions,
which count from 0 in each segment.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxbucket.base.batch import Batch
from jaxbucket.base.checks import check_choice, check_integer

Per: TypeAlias = Literal["token", "sequence"]


def attention_mask(
    segment_ids: jax.Array,
    positions: jax.Array | None = None,
    *,
    key_segment_ids: jax.Array | None = None,
) -> jax.Array:
    """Returns which keys a query may see: real ones of its own example.

    For `jax.nn.dot_product_attention(query, key, value, mask=)`, or Flax's. It takes
    B * T * T bytes, unless the compiler fuses it; a query that is padding sees nothing.

    Example:
      >>> print(attention_mask(jnp.array([[1, 1, 2, 0]]))[0, 0].astype(int))
      [[1 1 0 0]
       [1 1 0 0]
       [0 0 1 0]
       [0 0 0 0]]

    Args:
      segment_ids: `[B, T]` int, of queries and keys.
      positions: `[B, T]` int, for causal attention: keys up to the query's position.
        None for attention in both directions.
      key_segment_ids: `[B, S]` int, those of keys where they are another sequence, such
        as inputs that targets look at; by default `segment_ids`.

    Returns:
      `[B, 1, T, S]` bool: batch, heads, queries, keys.

    Raises:
      ValueError: for positions where queries and keys are different sequences.
    """
    if key_segment_ids is None:
        key_segment_ids = segment_ids
    elif positions is not None:
        raise ValueError(
            "`positions` are of one sequence, and `key_segment_ids` of another: keys "
            "of another sequence come neither before a query nor after it. Leave "
            "either out."
        )
    queries, keys = segment_ids[:, :, None], key_segment_ids[:, None, :]
    mask = (queries == keys) & (keys > 0)
    if positions is not None:
        mask &= positions[:, :, None] >= positions[:, None, :]
    return mask[:, None]


def sequence_lengths(segment_ids: jax.Array) -> jax.Array:
    """Returns how many tokens each row has.

    For rows of one example no mask is needed: give these to
    `jax.nn.dot_product_attention` as `query_seq_lengths` and `key_value_seq_lengths`.

    Example:
      >>> sequence_lengths(jnp.array([[1, 1, 0], [0, 0, 0]])).tolist()
      [2, 0]

    Args:
      segment_ids: `[B, T]` int.

    Returns:
      `[B]` int32.
    """
    return jnp.sum(segment_ids > 0, axis=1, dtype=jnp.int32)


def token_weights(
    batch: Batch,
    per: Per = "token",
    *,
    sequence: str | None = None,
    where: jax.Array | None = None,
) -> jax.Array:
    """Returns what each token counts for in a loss, packed or not.

    Their sum is the number of tokens, or of sequences. A loss is then
    `(jnp.sum(nats * weights), jnp.sum(weights))`.

    Example:
      >>> ids = {"tokens": jnp.array([[1, 1, 2, 0]])}
      >>> batch = Batch({}, ids, {"tokens": jnp.array([[0, 1, 0, 0]])})
      >>> print(token_weights(batch, "sequence"))
      [[0.5 0.5 1.  0. ]]

    Args:
      batch: packed or not.
      per: "token" for the mean over all tokens; "sequence" for the mean over sequences
        of the mean over the tokens of each.
      sequence: whose tokens they are, where several have lengths of their own.
      where: `[B, T]` bool, the tokens that count, or numbers, which are 0 for others,
        such as `next_tokens(batch).weights`; by default all that are real. A sequence
        without any counts for nothing.

    Returns:
      `[B, T]` float32.

    Raises:
      ValueError: if several sequences have lengths of their own and none of them is
        named, for an unknown `per`, or if `batch` is none.
    """
    check_choice("per", per, get_args(Per))
    _check_is_batch(batch)
    ids = _segment_ids(batch, sequence)
    mask = ids > 0 if where is None else (ids > 0) & where.astype(bool)
    if per == "token":
        return mask.astype(jnp.float32)

    def of_row(ids: jax.Array, mask: jax.Array) -> jax.Array:
        # No more segments than tokens, and 0 for padding.
        counts = jnp.zeros(ids.shape[0] + 1, jnp.float32).at[ids].add(mask)
        return mask / jnp.maximum(counts[ids], 1)

    return jax.vmap(of_row)(ids, mask.astype(jnp.float32))


class NextTokens(NamedTuple):
    """What a model that predicts the next token sees, and what it is to find.

    Attributes:
      inputs: `[B, T]` integers.
      targets: `[B, T]` integers, each what the input at its place is followed by; 0
        where the weight is 0.
      weights: `[B, T]` float32, what each target counts for in a loss; 0 in padding.
    """

    inputs: Any
    targets: Any
    weights: Any


def next_tokens(
    batch: Batch,
    name: str | None = None,
    *,
    sequence: str | None = None,
    loss_weights: str | None = None,
    begin: int | None = None,
) -> NextTokens:
    r"""Returns inputs, targets and weights to train a model on next tokens.

    Right for padded rows and packed ones: no token is predicted from another example,
    nor from padding. T stays what it is, so that segment ids and positions go with the
    inputs. A loss is `(jnp.sum(nats * weights), jnp.sum(weights))`.

    Example:
      >>> rows = [[{"tokens": [7, 3, 9]}, {"tokens": [5, 2]}]]
      >>> from jaxbucket import Bucket
      >>> from jaxbucket.data import collate_rows
      >>> batch = collate_rows(rows, Bucket(1, 6), max_segments=2)
      >>> print(*next_tokens(batch), sep="\n")
      [[7 3 9 5 2 0]]
      [[3 9 0 2 0 0]]
      [[1. 1. 0. 1. 0. 0.]]
      >>> print(*next_tokens(batch, begin=1), sep="\n")
      [[1 7 3 1 5 1]]
      [[7 3 9 5 2 0]]
      [[1. 1. 1. 1. 1. 0.]]

    Args:
      batch: numpy or `jax.Array`s, also inside of jit; packed or not.
      name: the feature that holds the tokens, `[B, T]` integers; by default the only
        one that does.
      sequence: whose lengths it has, where several have their own; by default its own.
      loss_weights: a feature `[B, T]`, what each token counts for as a target: 0 for
        those of a prompt, for example. By default all count 1.
      begin: a token that stands before the first one of every example. It makes the
        first token a target as well; inputs are shifted then, and targets are not.

    Returns:
      `(inputs, targets, weights)`. Tokens of less than 32 bits become int32.

    Raises:
      ValueError: if a feature is missing or not `[B, T]`, the tokens are not integers,
        or `name` or `sequence` is missing where there are several; if `batch` is none.
    """
    _check_is_batch(batch)
    if name is None:
        name = _token_feature(batch)
    if sequence is None and name in batch.segment_ids:
        sequence = name
    ids = _segment_ids(batch, sequence)
    tokens = _feature(batch, "name", name, ids)
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"`name={name!r}`: the feature is {tokens.dtype}, and tokens are integers. "
            "Name the feature that holds them."
        )
    if tokens.dtype.itemsize < 4:
        tokens = tokens.astype(np.int32)
    counts = None
    if loss_weights is not None:
        counts = _feature(batch, "loss_weights", loss_weights, ids).astype(np.float32)
    is_real = ids > 0
    if begin is None:
        inputs, targets = tokens, _shifted(tokens, -1)
        is_target = is_real & (_shifted(ids, -1) == ids)
        counts = counts if counts is None else _shifted(counts, -1)
    else:
        is_first = ~is_real | (_shifted(ids, 1) != ids)
        begin = _check_token("begin", begin, tokens.dtype)
        inputs, targets = _where(is_first, begin, _shifted(tokens, 1)), tokens
        is_target = is_real
    if counts is None:
        weights = is_target.astype(np.float32)
    else:
        # What fills the padding of weights may be anything.
        weights = _where(is_target, counts, np.float32(0))
    targets = _where(weights != 0, targets, tokens.dtype.type(0))
    return NextTokens(inputs, targets, weights)


def _check_is_batch(batch: Any) -> None:
    if not isinstance(batch, Batch):
        raise ValueError(
            f"`batch` is a {type(batch).__name__}: give a `jaxbucket.Batch`, as "
            "`collate_rows` makes one of examples. Segment ids say where they end."
        )


def _segment_ids(batch: Batch, sequence: str | None) -> Any:
    """`[B, T]`, those of a sequence, or of the only one there is."""
    if sequence is None and len(batch.segment_ids) == 1:
        (sequence,) = batch.segment_ids
    if sequence not in batch.segment_ids:
        raise ValueError(
            f"`sequence={sequence!r}`: choose one of {sorted(batch.segment_ids)}, "
            "which have lengths of their own."
        )
    return batch.segment_ids[sequence]


def _token_feature(batch: Batch) -> str:
    """The only feature that can hold tokens."""
    shapes = [ids.shape for ids in batch.segment_ids.values()]
    names = [
        name
        for name, x in batch.features.items()
        if x.shape in shapes and jnp.issubdtype(x.dtype, jnp.integer)
    ]
    if len(names) != 1:
        raise ValueError(
            f"`name` is missing: {sorted(names)} are features of [B, T] integers. Name "
            "the one that holds the tokens."
        )
    return names[0]


def _feature(batch: Batch, argument: str, name: str, ids: Any) -> Any:
    """A feature that has a value for every position."""
    if name not in batch.features:
        raise ValueError(
            f"`{argument}={name!r}`: the features are {sorted(batch.features)}. Choose "
            "from these."
        )
    value = batch.features[name]
    if value.shape != ids.shape:
        raise ValueError(
            f"`{argument}={name!r}`: the feature is {list(value.shape)}, and must be "
            f"[B, T], {list(ids.shape)} here. Name one with a value for every token."
        )
    return value


def _check_token(argument: str, token: int, dtype: Any) -> Any:
    """The token in the dtype of the others."""
    limits = jnp.iinfo(dtype)
    if not limits.min <= check_integer(argument, token) <= limits.max:
        raise ValueError(
            f"`{argument}={token}`: tokens are {dtype}, which cannot hold it. Choose "
            "another one."
        )
    return limits.dtype.type(token)


def _shifted(x: Any, by: int) -> Any:
    """`[B, T]` with every column moved right by 1, or left by -1, and 0 behind it."""
    numpy = jnp if isinstance(x, jax.Array) else np
    parts = [x[:, 1:], numpy.zeros_like(x[:, :1])]
    if by > 0:
        parts = [numpy.zeros_like(x[:, :1]), x[:, :-1]]
    return numpy.concatenate(parts, axis=1)


def _where(condition: Any, x: Any, y: Any) -> Any:
    """Arrays of numpy stay such."""
    is_jax = any(isinstance(z, jax.Array) for z in (condition, x, y))
    return (jnp if is_jax else np).where(condition, x, y)
