"""Flax layers whose results depend neither on padding nor on the devices.

`statistics` computes the mean and the variance over the real positions of all devices.
`nnx_batch_norm` and `linen_batch_norm` are Flax's batch normalization with these.
"""

from jaxbucket.base.lazy import lazy_names as _lazy_names

with _lazy_names(globals()):
    from jaxbucket.layers.linen_batch_norm import LinenBatchNorm as LinenBatchNorm
    from jaxbucket.layers.nnx_batch_norm import NnxBatchNorm as NnxBatchNorm
    from jaxbucket.layers.statistics import masked_statistics as masked_statistics
