"""Checks of the README's guarantees 1-4 and 6 for any loader, and 8 for any loss.

`check_batches` (in `batches`) only needs numpy. `check_loss` (in `loss`) compares the
results of a loss for a batch with its results for variants of that batch (`variants`).
"""

from jaxbucket.base.lazy import lazy_names as _lazy_names

with _lazy_names(globals()):
    from jaxbucket.testing.batches import check_batches as check_batches
    from jaxbucket.testing.loss import check_loss as check_loss
