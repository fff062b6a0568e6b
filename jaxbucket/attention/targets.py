"""The targets of tokens and their weights in a loss, computed inside of jit."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxbucket.base.batch import Batch, check_is_batch
from jaxbucket.base.checks import check_choice, check_integer

Per: TypeAlias = Literal["token", "sequence"]


def token_weights(
    batch: Batch,
    per: Per = "token",
    *,
    sequence: str | None = None,
    where: jax.Array | None = None,
) -> jax.Array:
    """Returns the weight of each token in a loss.

    The weights add up to the number of tokens or of sequences. A loss is then
    `(jnp.sum(nats * weights), jnp.sum(weights))`.

    Example:
      >>> ids = {"tokens": jnp.array([[1, 1, 2, 0]])}
      >>> batch = Batch({}, ids, {"tokens": jnp.array([[0, 1, 0, 0]])})
      >>> print(token_weights(batch, "sequence"))
      [[0.5 0.5 1.  0. ]]

    Args:
      batch: a batch of padded or packed rows.
      per: "token" for the mean over all tokens; "sequence" for the mean over sequences
        of the mean over the tokens of each sequence.
      sequence: the name of the sequence; required if the batch has several sequences
        with their own lengths.
      where: `[B, T]` bool, the tokens that count, or numbers that are 0 for the other
        tokens, such as `next_tokens(batch).weights`; by default all real tokens. A
        sequence in which no token counts has no weight.

    Returns:
      `[B, T]` float32.

    Raises:
      ValueError: if `batch` is not a `Batch`, `per` is unknown, or `sequence` is
        missing although there are several sequences.
    """
    check_choice("per", per, get_args(Per))
    ids = row_ids(batch, sequence)
    mask = ids > 0 if where is None else (ids > 0) & where.astype(bool)
    if per == "token":
        return mask.astype(jnp.float32)
    # Every example has a token in some sequence, so none has a larger number.
    largest = sum(x.shape[1] for x in batch.segment_ids.values())

    def of_row(ids: jax.Array, mask: jax.Array) -> jax.Array:
        counts = jnp.zeros(largest + 1, jnp.float32).at[ids].add(mask)
        return mask / jnp.maximum(counts[ids], 1)

    return jax.vmap(of_row)(ids, mask.astype(jnp.float32))


class NextTokens(NamedTuple):
    """Inputs, targets and weights for next-token prediction.

    Example:
      >>> from jaxbucket import Bucket
      >>> from jaxbucket.data.collate import collate_rows
      >>> batch = collate_rows([{"tokens": [7, 3, 9]}], Bucket(1, 4))
      >>> next_tokens(batch).targets.tolist()
      [[3, 9, 0, 0]]

    Attributes:
      inputs: `[B, T]` integers.
      targets: `[B, T]` integers, the token that follows each input; 0 where the weight
        is 0.
      weights: `[B, T]` float32, the weight of each target in a loss; 0 in padding.
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
    bos_token: int | None = None,
) -> NextTokens:
    r"""Returns inputs, targets and weights for next-token prediction.

    The result is correct for padded and packed rows: no token is predicted from a
    different example or from padding. T does not change, so the segment ids and
    positions of the batch remain valid for the inputs. A loss is
    `(jnp.sum(nats * weights), jnp.sum(weights))`.

    Example:
      >>> rows = [[{"tokens": [7, 3, 9]}, {"tokens": [5, 2]}]]
      >>> from jaxbucket import Bucket
      >>> from jaxbucket.data.collate import collate_rows
      >>> batch = collate_rows(rows, Bucket(1, 6), max_segments=2)
      >>> print(*next_tokens(batch), sep="\n")
      [[7 3 9 5 2 0]]
      [[3 9 0 2 0 0]]
      [[1. 1. 0. 1. 0. 0.]]
      >>> print(*next_tokens(batch, bos_token=1), sep="\n")
      [[1 7 3 1 5 1]]
      [[7 3 9 5 2 0]]
      [[1. 1. 1. 1. 1. 0.]]

    Args:
      batch: a batch of padded or packed rows, with numpy arrays or `jax.Array`s. It may
        be traced by jit.
      name: the feature with the tokens, `[B, T]` integers; by default the only feature
        of this kind.
      sequence: the sequence whose segment ids apply to the tokens; by default the
        sequence named `name`, or the only sequence.
      loss_weights: the name of a `[B, T]` feature with the weight of each token as a
        target, such as 0 in a prompt: floats of at least 0, or a mask of booleans or of
        the integers 0 and 1. The values are checked unless they are traced. By default
        all weights are 1.
      bos_token: a token to insert before the first token of every example, which makes
        the first token a target as well. The inputs are then shifted instead of the
        targets.

    Returns:
      `(inputs, targets, weights)`. Tokens of less than 32 bits become int32.

    Raises:
      ValueError: if `batch` is not a `Batch`; if a feature is missing or not `[B, T]`;
        if the tokens are not integers; if the weights are negative, or integers above
        1; if `name` or `sequence` is missing although there are several
        candidates.
      OverflowError: if the dtype of the tokens cannot hold `bos_token`.
    """
    check_is_batch("batch", batch)
    if name is None:
        name = token_feature(batch, "name", (loss_weights,))
    if sequence is None and name in batch.segment_ids:
        sequence = name
    ids = row_ids(batch, sequence)
    tokens = _feature(batch, "name", name, ids)
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"`name={name!r}` is a feature of {tokens.dtype}. Name one of integers."
        )
    if tokens.dtype.itemsize < 4:
        tokens = tokens.astype(np.int32)
    counts = None
    if loss_weights is not None:
        counts = _loss_weights(batch, loss_weights, ids)
    is_real = ids > 0
    is_jax = any(isinstance(x, jax.Array) for x in jax.tree.leaves(batch))
    xp = jnp if is_jax else np
    if bos_token is None:
        inputs, targets = tokens, shift_left(tokens)
        is_target = is_real & (shift_left(ids) == ids)
        counts = counts if counts is None else shift_left(counts)
    else:
        is_first = ~is_real | (shift_right(ids) != ids)
        first = np.array(check_integer("bos_token", bos_token), tokens.dtype)
        inputs, targets = xp.where(is_first, first, shift_right(tokens)), tokens
        is_target = is_real
    # Features may hold any value in padding, including NaN.
    values: Any = np.float32(1) if counts is None else counts
    weights = xp.where(is_target, values, np.float32(0))
    targets = xp.where(weights != 0, targets, tokens.dtype.type(0))
    return NextTokens(inputs, targets, weights)


def shift_left(x: Any) -> Any:
    """Returns `[B, T]` values moved one column to the left, 0 in the last one."""
    return x.__array_namespace__().pad(x, ((0, 0), (0, 1)))[:, 1:]


def shift_right(x: Any) -> Any:
    """Returns `[B, T]` values moved one column to the right, 0 in the first one."""
    return x.__array_namespace__().pad(x, ((0, 0), (1, 0)))[:, :-1]


def row_ids(batch: Batch, sequence: str | None) -> Any:
    """Returns the segment ids `[B, T]` of a sequence, by default of the only one."""
    check_is_batch("batch", batch)
    if sequence is None and len(batch.segment_ids) == 1:
        (sequence,) = batch.segment_ids
    if sequence not in batch.segment_ids:
        raise ValueError(
            f"`sequence={sequence!r}` must name a sequence of the batch. Choose one of "
            f"{sorted(batch.segment_ids)}."
        )
    return batch.segment_ids[sequence]


def token_feature(batch: Batch, argument: str, others: tuple[Any, ...]) -> str:
    """Returns the name of the only feature that can hold tokens, besides others."""
    shapes = [ids.shape for ids in batch.segment_ids.values()]
    names = [
        name
        for name, x in batch.features.items()
        if name not in map(str, others)
        and x.shape in shapes
        and jnp.issubdtype(x.dtype, jnp.integer)
    ]
    if len(names) != 1:
        raise ValueError(
            f"`{argument}` is required, because the features of [B, T] integers are "
            f"{sorted(names)}. Name the feature that holds the tokens."
        )
    return names[0]


def _feature(batch: Batch, argument: str, name: Any, ids: Any) -> Any:
    """Returns a feature, which must have a value for every position."""
    shapes = {x: list(value.shape) for x, value in batch.features.items()}
    if not isinstance(name, str) or shapes.get(name) != list(ids.shape):
        raise ValueError(
            f"`{argument}={name!r}` must name a feature with a value for every token, "
            f"[B, T], here {list(ids.shape)}. The batch has {shapes}."
        )
    return batch.features[name]


def _loss_weights(batch: Batch, name: str, ids: Any) -> Any:
    """Returns the feature with the weights of tokens, as float32."""
    values = _feature(batch, "loss_weights", name, ids)
    if _is_known(values) and _is_known(ids):
        real = np.asarray(values)[np.asarray(ids) > 0]
        is_integer = np.issubdtype(real.dtype, np.integer)
        wrong = (real < 0) | (real > 1) if is_integer else real < 0
        if wrong.any():
            raise ValueError(
                f"`loss_weights={name!r}` has the value {real[wrong][0]}. Let the "
                "source return floats of at least 0, booleans, or integers that are 0 "
                "or 1. Labels that are -100 in the prompt are not weights: use "
                "`labels != -100`."
            )
    return values.astype(np.float32)


def _is_known(array: Any) -> bool:
    """Returns whether this process can read an array now."""
    return not isinstance(array, Tracer) and (
        isinstance(array, np.ndarray) or array.is_fully_addressable
    )
