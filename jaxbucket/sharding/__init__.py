"""Meshes, the rows that each process loads for them, and batches as global arrays.

`mesh` says how batches and states lie on a mesh, `global_batch` puts batches there.
"""

from jaxbucket.base.lazy import lazy_names as _lazy_names

with _lazy_names(globals()):
    from jaxbucket.sharding.global_batch import batch_specs as batch_specs
    from jaxbucket.sharding.global_batch import prefetch_to_mesh as prefetch_to_mesh
    from jaxbucket.sharding.mesh import batch_sharding as batch_sharding
    from jaxbucket.sharding.mesh import data_mesh as data_mesh
    from jaxbucket.sharding.mesh import fully_sharded as fully_sharded
    from jaxbucket.sharding.mesh import local_rows as local_rows
    from jaxbucket.sharding.mesh import replicate as replicate
