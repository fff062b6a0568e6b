"""How a step divides the rows of its batch over devices, known while it is traced.

Rows are sharded over some axes of a mesh. A row of a long bucket may also be cut into
equal parts, its columns, over further axes.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from jaxbucket.base.batch import Batch
from jaxbucket.base.row_shard import spec_names


class RowLayout(NamedTuple):
    """The devices of the rows of a batch, and of the parts of each row.

    Attributes:
      mesh: the mesh on which the batch is sharded.
      rows: the mesh axes over which rows are sharded.
      columns: the mesh axes over which each row is cut; empty if rows are whole.
      heads: the mesh axes over which the heads of a model are sharded, if these are
        known.
    """

    mesh: Mesh | AbstractMesh
    rows: tuple[str, ...]
    columns: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()

    @property
    def num_cuts(self) -> int:
        """The number of devices that share a row."""
        return math.prod(self.mesh.shape[name] for name in self.columns)


# `with row_layout(layout)` makes a layout the current one while a step is traced, which
# `row_layout.value` is, or None. It is part of the key of jax's caches, so that a
# function that is traced again in another layout, such as `jax.checkpoint` of a block,
# is not taken from a cache.
row_layout: Any = jax.make_user_context(None)


def explicit_layout(x: jax.Array) -> RowLayout | None:
    """Returns the layout of an array `[B, T, N, H]` on a mesh with explicit axes."""
    sharding = jax.typeof(x).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    axes = (spec_names(entry) for entry in (*sharding.spec, None, None, None)[:3])
    return RowLayout(sharding.mesh, *axes)


def layout_of(batch: Any) -> RowLayout | None:
    """Returns the layout of a batch on a mesh, or of its specification.

    It is None if the batch is not on a mesh, as inside of a `jax.jit`.
    """
    if not isinstance(batch, Batch):
        return None
    leaf = next(iter(batch.segment_ids.values()))
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return None
    rows, columns = (*sharding.spec, None, None)[:2]
    return RowLayout(sharding.mesh, spec_names(rows), spec_names(columns))
