"""The options of `stream_batches`, checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, Literal, TypeAlias, cast, get_args

from jaxbucket.base.batch import RowShard
from jaxbucket.base.checks import check_choice
from jaxbucket.base.padding import PadValue
from jaxbucket.base.policies import GROUPS, Group
from jaxbucket.data.example import Sequences, listed_names
from jaxbucket.data.sequence_axes import axis_labels, listed_by_sequence
from jaxbucket.data.transform import Transform, transform_name

Policy: TypeAlias = Literal["closest", "first"]

POLICIES: tuple[str, ...] = get_args(Policy)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a stream; `stream_batches` documents each field."""

    pool_size: int
    policy: Policy
    shard: RowShard
    accumulate: int
    group: Group
    num_steps: int | None
    num_epochs: int | None
    pack: bool
    max_wait: int
    sequences: Sequences
    pad_value: PadValue
    seed: int
    transform: Transform | None = None

    def __post_init__(self):
        check_choice("policy", self.policy, POLICIES)
        check_choice("group", self.group, GROUPS)

    @property
    def is_single_process(self) -> bool:
        """Whether this process has all rows of every batch."""
        return len(self.shard.parts) == self.shard.num_parts

    @property
    def buckets_per_step(self) -> int:
        """The number of buckets that are chosen in a step."""
        return self.accumulate if self.group == "mixed" else 1

    @property
    def micro_batches_per_bucket(self) -> int:
        """The number of micro-batches that are filled for each chosen bucket."""
        return self.accumulate // self.buckets_per_step

    @property
    def max_batch_size(self) -> int:
        """The largest B for which the pools can hold all examples of a batch."""
        local_rows = self.pool_size // self.micro_batches_per_bucket
        return local_rows * self.shard.num_parts // len(self.shard.parts)

    def config(self) -> dict[str, Any]:
        """Returns the options that batches depend on, the same in all processes.

        The values are plain Python for JSON.
        """
        config = {
            "pool_size": self.pool_size,
            "policy": self.policy,
            "parts": self.shard.num_parts,
            "accumulate": self.accumulate,
            "group": self.group,
            "pack": self.pack,
            "max_wait": self.max_wait,
            "sequences": axis_labels(self.sequences),
            "pad_value": self.pad_value,
            "seed": self.seed,
        }
        if self.transform is not None:
            # Absent without a transform, so that older fingerprints stay valid.
            config["transform"] = transform_name(self.transform)
        return config


def checked_sequences(
    sequences: Sequences, names: Collection[str]
) -> list[str] | dict[str, list[str]] | None:
    """Returns the features that are padded, as lists.

    Args:
      sequences: names of features; a mapping from each of several sequences to its
        features; or None.
      names: the names of several sequences; empty if examples have one length.

    Raises:
      ValueError: if a feature is repeated, or the sequences are not those of `names`.
    """
    if names:
        return listed_by_sequence(sequences, names)
    return None if sequences is None else listed_names(cast(Sequence[str], sequences))
