"""A function for arguments of fixed shapes."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

from jaxbucket.base.buckets import Bucket
from jaxbucket.compile.flops import count_flops
from jaxbucket.compile.jax_settings import following_prng

# A bucket, or the name of a phase that all have in common.
Label: TypeAlias = Bucket | str


@dataclasses.dataclass(frozen=True)
class Program:
    """What is to be compiled.

    Attributes:
      label: the bucket it is for, or the phase.
      fn: a jitted function.
      args: its arguments, or their shapes, dtypes and shardings.
    """

    label: Label
    fn: Any
    args: tuple[Any, ...]

    @property
    def name(self) -> str:
        return getattr(self.fn, "__name__", "step")

    def lower(self) -> tuple[Any, int | None]:
        """Traces it; returns that, and how many operations it has."""
        # What a file keeps of this process is run by others.
        with following_prng():
            if not hasattr(self.fn, "trace"):
                return self.fn.lower(*self.args), None
            traced = self.fn.trace(*self.args)
            return traced.lower(), count_flops(traced.jaxpr)
