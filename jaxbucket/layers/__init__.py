"""Flax layers whose results depend neither on padding nor on the devices.

`statistics` computes the mean and the variance over the real positions of all devices.
`nnx_batch_norm` and `linen_batch_norm` are Flax's batch normalization with these.
"""

from etils import epy as _epy

with _epy.lazy_api_imports(globals()):
    from jaxbucket.layers.linen_batch_norm import LinenBatchNorm
    from jaxbucket.layers.nnx_batch_norm import NnxBatchNorm
    from jaxbucket.layers.statistics import masked_statistics
