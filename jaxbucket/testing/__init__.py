"""Checks of the README's guarantees 1-4 and 6 for any loader, and 8 for any loss.

`check_batches` (in `batches`) only needs numpy. `check_loss` (in `loss`) compares the
results of a loss for a batch with its results for variants of that batch (`variants`).
"""

from etils import epy as _epy

with _epy.lazy_api_imports(globals()):
    from jaxbucket.testing.batches import check_batches
    from jaxbucket.testing.loss import check_loss
