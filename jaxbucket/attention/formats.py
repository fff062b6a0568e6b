"""Batches as flat dicts, under the names that other libraries use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from jaxbucket.attention.masks import attention_mask
from jaxbucket.attention.targets import next_tokens, row_ids, shift_right, token_feature
from jaxbucket.base.batch import Batch, check_is_batch
from jaxbucket.base.checks import check_choice

# Output name -> the name of a column below, "encoder." and such a name, or a function.
BatchFormat: TypeAlias = Mapping[str, str | Callable[[Batch], Any]]

_IGNORED_LABEL = -100
_T5_DECODER: BatchFormat = {
    "decoder_input_tokens": "decoder_inputs",
    "decoder_target_tokens": "tokens",
    "decoder_loss_weights": "decoder_weights",
    "decoder_segment_ids": "segment_ids",
    "decoder_positions": "positions",
}

# By the name of a library. Add one of your own, or pass it to `convert_batch`.
FORMATS: dict[str, BatchFormat] = {
    "easylm": {
        "input_tokens": "tokens",
        "target_tokens": "targets",
        "loss_masks": "weights",
    },
    "gemma": {
        "input": "tokens",
        "target": "target_column",
        "loss_mask": "weight_column",
    },
    "huggingface": {
        "input_ids": "tokens",
        "attention_mask": "mask",
        "position_ids": "positions",
        "labels": "labels",
    },
    "huggingface_seq2seq": {
        "input_ids": "encoder.tokens",
        "attention_mask": "encoder.mask",
        "decoder_input_ids": "decoder_inputs",
        "decoder_attention_mask": "mask",
        "labels": "decoder_labels",
    },
    "maxtext": {
        "inputs": "tokens",
        "inputs_position": "positions",
        "inputs_segmentation": "segment_ids",
        "targets": "targets",
        "targets_position": "positions",
        "targets_segmentation": "target_segment_ids",
    },
    "t5": {
        "encoder_input_tokens": "encoder.tokens",
        "encoder_segment_ids": "encoder.segment_ids",
        "encoder_positions": "encoder.positions",
        **_T5_DECODER,
    },
    "t5_decoder": _T5_DECODER,
    "tunix": {
        "input_tokens": "tokens",
        "input_mask": "is_target",
        "positions": "positions",
        "attention_mask": "causal_mask",
    },
}


def convert_batch(
    batch: Batch,
    names: str | BatchFormat,
    *,
    tokens: str | None = None,
    encoder: str | None = None,
    loss_weights: str | None = None,
    bos_token: int = 0,
) -> dict[str, Any]:
    """Returns a batch as a flat dict under the names of another library.

    Example:
      >>> from jaxbucket import Bucket
      >>> from jaxbucket.data.collate import collate_rows
      >>> batch = collate_rows([{"tokens": [7, 3, 9]}], Bucket(1, 4))
      >>> for name, x in convert_batch(batch, "huggingface").items():
      ...     print(name, x.tolist())
      input_ids [[7, 3, 9, 0]]
      attention_mask [[1, 1, 1, 0]]
      position_ids [[0, 1, 2, 0]]
      labels [[-100, 3, 9, -100]]

    Example: names of your own, and a function of the batch.
      >>> mine = {"x": "tokens", "y": "targets", "rows": lambda batch: batch.row_mask}
      >>> convert_batch(batch, mine)["rows"].tolist()
      [True]

    The columns, `[B, T]` unless another shape is given:

    * "tokens", "positions" and "segment_ids", as in the batch (tokens of less than 32
      bits become int32);
    * "mask": int32, 1 for real tokens;
    * "targets", "weights": the token that follows each one in its example, and its
      weight, as `next_tokens` returns them; "target_segment_ids": int32, the segment
      ids where the weight is not 0;
    * "target_column", "weight_column": these, `[B, T, 1]`;
    * "is_target": int32, 1 for tokens that are a target; "labels": these tokens, and
      -100 for others, for a model that shifts them itself;
    * "decoder_inputs": the tokens after `bos_token`, which starts every example
      and fills padding;
      "decoder_weights": float32, the weight of each token as the target of these, and
      "decoder_labels": the tokens, -100 where that is 0;
    * "causal_mask": `[B, T, T]` bool, the tokens that each may attend to.

    "encoder." before a column takes it of the encoder's sequence.

    Args:
      batch: a batch of padded or packed rows, with numpy arrays or `jax.Array`s. It may
        be traced by jit.
      names: a key of `FORMATS`, or a mapping from each output name to a column or to a
        function of the batch. Only "maxtext", "t5", "t5_decoder" and "tunix" keep the
        examples of a packed row apart.
      tokens: the feature with the tokens, or with those of the decoder; by default the
        only feature of `[B, T]` integers.
      encoder: the feature with the tokens of the encoder.
      loss_weights: a feature with the weight of each token as a target, as for
        `next_tokens`.
      bos_token: the token that starts the decoder's inputs.

    Returns:
      The columns under their new names, followed by all features that are in none of
      the roles above, under their own names.

    Raises:
      ValueError: if `batch` is not a `Batch`, a format, column or feature is unknown, a
        feature already has one of the names, or `encoder` is needed but missing.
    """
    check_is_batch("batch", batch)
    if isinstance(names, str):
        check_choice("names", names, sorted(FORMATS))
        names = FORMATS[names]
    if tokens is None:
        tokens = token_feature(batch, "tokens", (loss_weights, encoder))
    known = _columns(batch, tokens, loss_weights, bos_token)
    if encoder is not None:
        columns = _columns(batch, encoder, None, bos_token)
        known |= {f"encoder.{name}": column for name, column in columns.items()}
    used = {tokens, encoder, loss_weights}
    others = {name: x for name, x in batch.features.items() if name not in used}
    if taken := sorted(others.keys() & names.keys()):
        raise ValueError(
            f"`features` has {taken}, which keep their names, so `names` cannot use "
            "them too. Leave them out of `names`, or rename these features."
        )
    columns = {}
    for name, column in names.items():
        if callable(column):
            columns[name] = column(batch)
        elif column in known:
            columns[name] = known[column]()
        else:
            raise ValueError(
                f"`names` has {column!r}. Pass `encoder=` for columns of an encoder. "
                f"The columns are {sorted(known)}."
            )
    return {**columns, **others}


def _sequence_of(batch: Batch, name: str) -> str:
    """Returns the sequence of a feature: of its name, or the only one of its shape."""
    if name in batch.segment_ids:
        return name
    shape = getattr(batch.features.get(name), "shape", ())
    fitting = [k for k, ids in batch.segment_ids.items() if ids.shape == shape[:2]]
    if len(fitting) != 1:
        raise ValueError(
            f"`tokens` or `encoder` names {name!r}, which is a feature of "
            f"{len(fitting)} of the sequences {sorted(batch.segment_ids)}. Name one of "
            f"{sorted(batch.features)}."
        )
    return fitting[0]


def _columns(
    batch: Batch, name: str, loss_weights: str | None, bos_token: int
) -> dict[str, Callable[[], Any]]:
    """Returns functions for the columns of a sequence; `convert_batch` describes them.

    Each is called only if it is needed, because a mask has T * T entries.
    """
    sequence = _sequence_of(batch, name)
    ids, positions = row_ids(batch, sequence), batch.positions[sequence]
    shifted = functools.partial(
        next_tokens, batch, name, sequence=sequence, loss_weights=loss_weights
    )

    known: dict[str, Callable[[], Any]] = {
        "tokens": lambda: shifted().inputs,
        "positions": lambda: positions,
        "segment_ids": lambda: ids,
        "mask": lambda: _as_int(ids > 0),
        "targets": lambda: shifted().targets,
        "weights": lambda: shifted().weights,
        "target_segment_ids": lambda: ids * _as_int(known["weights"]() != 0),
        "target_column": lambda: known["targets"]()[..., None],
        "weight_column": lambda: known["weights"]()[..., None],
        "is_target": lambda: _as_int(shift_right(known["weights"]()) != 0),
        "labels": lambda: _labels(known["tokens"](), known["is_target"]()),
        "decoder_inputs": lambda: shifted(bos_token=bos_token).inputs,
        "decoder_weights": lambda: shifted(bos_token=bos_token).weights,
        "decoder_labels": lambda: _labels(
            known["tokens"](), _as_int(known["decoder_weights"]() != 0)
        ),
        "causal_mask": lambda: attention_mask(ids, positions)[:, 0],
    }
    return known


def _as_int(mask: Any) -> Any:
    return mask.astype("int32")


def _labels(tokens: Any, is_target: Any) -> Any:
    """Returns the tokens that are targets, and -100 for others."""
    if tokens.dtype.kind == "u":
        tokens = tokens.astype(f"int{8 * tokens.dtype.itemsize}")
    return (tokens - _IGNORED_LABEL) * is_target.astype(tokens.dtype) + _IGNORED_LABEL
