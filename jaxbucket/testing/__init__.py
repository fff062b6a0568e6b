"""Checks of guarantees 1-4 and 6 for any loader, and 8 for any loss or step.

`check_batches` (in `batches`) only needs numpy. `check_loss` (in `loss`) and
`check_step` (in `step`) compare the results of a loss, or of a step of your own, for a
batch with its results for variants of that batch (`variants`).
"""

from jaxbucket.base.lazy import lazy_names as _lazy_names

with _lazy_names(globals()):
    from jaxbucket.testing.batches import check_batches as check_batches
    from jaxbucket.testing.loss import check_loss as check_loss
    from jaxbucket.testing.step import check_step as check_step
