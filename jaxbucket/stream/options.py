"""How a stream is batched: options that are checked."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, TypeAlias, get_args

from jaxbucket.base.checks import check_choice
from jaxbucket.base.padding import PadValue
from jaxbucket.base.types import GROUPS, Group, RowShard
from jaxbucket.data.transform import Transform, transform_name

Policy: TypeAlias = Literal["closest", "first"]

POLICIES: tuple[str, ...] = get_args(Policy)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How batches are cut; `stream_batches` says what each of them is."""

    pool_size: int
    policy: Policy
    shard: RowShard
    accumulate: int
    group: Group
    num_steps: int | None
    num_epochs: int | None
    packs: bool
    max_wait: int
    sequences: tuple[str, ...] | None
    pad_value: PadValue
    seed: int
    transform: Transform | None = None

    def __post_init__(self):
        check_choice("policy", self.policy, POLICIES)
        check_choice("group", self.group, GROUPS)

    @property
    def alone(self) -> bool:
        """Whether this process has all rows."""
        return len(self.shard.parts) == self.shard.num_parts

    @property
    def picks(self) -> int:
        """Buckets of a step."""
        return self.accumulate if self.group == "mixed" else 1

    @property
    def together(self) -> int:
        """Micro-batches of one bucket, that are filled together."""
        return self.accumulate // self.picks

    @property
    def most_rows(self) -> int:
        """B that a batch may have, for all of it is in the pools at once."""
        own = self.pool_size // self.together
        return own * self.shard.num_parts // len(self.shard.parts)

    def traits(self) -> dict[str, Any]:
        """What batches depend on, as plain Python, the same in all processes."""
        return {
            "pool_size": self.pool_size,
            "policy": self.policy,
            "parts": self.shard.num_parts,
            "accumulate": self.accumulate,
            "group": self.group,
            "pack": self.packs,
            "max_wait": self.max_wait,
            "sequences": None if self.sequences is None else list(self.sequences),
            "pad_value": self.pad_value,
            "seed": self.seed,
            **self._transform_trait(),
        }

    def _transform_trait(self) -> dict[str, str]:
        # Runs from before there were any have states and fingerprints without.
        if self.transform is None:
            return {}
        return {"transform": transform_name(self.transform)}
