"""Limits for devices of which several may share a row, and what they are needed for."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jaxbucket.base.checks import check_positive
from jaxbucket.base.length_counts import LengthCounts
from jaxbucket.base.row_shard import cuts_of, row_axes


def device_limits(
    num_devices: int, tokens_per_device: int, *, max_row_shards: int = 1
) -> dict[str, Any]:
    """Returns the options of `plan_buckets` for so many tokens on each device.

    A row is shared by as few devices as can hold it. B is a multiple of the number of
    devices where rows are whole, and of half of it where two devices share a row.

    Example: up to four of eight devices with 1,024 tokens each share a row.
      >>> limits = device_limits(8, 1024, max_row_shards=4)
      >>> [limits["batch_size_multiple"](seq_len) for seq_len in (1024, 1025, 4096)]
      [8, 4, 2]
      >>> import jaxbucket as jb
      >>> plan = jb.plan_buckets([100, 2000, 4000] * 8, num_buckets=3, **limits)
      >>> [str(bucket) for bucket in plan.buckets]
      ['[8, 100]', '[4, 2000]', '[2, 4000]']

    Args:
      num_devices: the number of devices that shard batches.
      tokens_per_device: the largest number of positions of a batch on each device.
      max_row_shards: the largest number of devices that may share a row, as for
        `jb.data_mesh`.

    Returns:
      `max_tokens`, `batch_size_multiple` (a function of T) and `seq_len_multiple`, for
      `plan_buckets`, `plan_packing` and `Limits`.

    Raises:
      ValueError: if a number is not positive, or `max_row_shards` does not divide
        `num_devices`.
    """
    num_devices = check_positive("num_devices", num_devices)
    cuts = cuts_of(row_axes(max_row_shards, num_devices))
    tokens = check_positive("tokens_per_device", tokens_per_device)

    def multiple(seq_len: Any) -> int:
        needed = sum(seq_len.values()) if hasattr(seq_len, "values") else seq_len
        cut = next((cut for cut in cuts if needed <= cut * tokens), cuts[-1])
        return num_devices // cut

    return {
        "max_tokens": num_devices * tokens,
        "batch_size_multiple": multiple,
        "seq_len_multiple": cuts[-1],
    }


def row_shard_shares(
    lengths: LengthCounts | ArrayLike, tokens_per_device: int, max_row_shards: int = 8
) -> list[dict[str, float]]:
    """Returns the shares of examples and tokens by the devices that a row needs.

    Example: of 3,300 tokens, 976 would be cut off.
      >>> for row in row_shard_shares([100, 1200, 2000], 1000, max_row_shards=2):
      ...     print(row["devices"], f"{row['examples']:.2f} {row['tokens']:.2f}")
      1 0.33 0.03
      2 0.67 0.97

    Args:
      lengths: `[N]` integers, one per example, or their `LengthCounts`.
      tokens_per_device: the largest number of tokens of a row on a device.
      max_row_shards: the largest number of devices that may share a row.

    Returns:
      For each possible number of `devices`, the share of `examples` and of `tokens` of
      which a row needs so many; and the share of all tokens that is `cut_off` if rows
      may have no more devices. Examples that need more than `max_row_shards` count
      with the last number.

    Raises:
      ValueError: if `lengths` are not positive integers, or a number is not positive.
    """
    counted = LengthCounts.of(lengths)
    values, numbers = counted.lengths, counted.counts
    all_tokens = (values * numbers).sum()
    tokens = check_positive("tokens_per_device", tokens_per_device)
    cuts = np.array(cuts_of(row_axes(max_row_shards)))
    place = np.minimum(np.searchsorted(cuts * tokens, values), len(cuts) - 1)
    return [
        {
            "devices": int(cut),
            "examples": float(numbers[place == k].sum() / numbers.sum()),
            "tokens": float((values * numbers)[place == k].sum() / all_tokens),
            "cut_off": float(
                (np.maximum(values - cut * tokens, 0) * numbers).sum() / all_tokens
            ),
        }
        for k, cut in enumerate(cuts.tolist())
    ]
