"""The guarantees of the README as checks: of any loader, and of any loss.

`check_batches` (`batches`) needs numpy alone. `check_loss` (`loss`) compares what a
loss gives for a batch with what it gives for that batch in other forms (`variants`).
"""

from etils import epy as _epy

with _epy.lazy_api_imports(globals()):
    from jaxbucket.testing.batches import check_batches
    from jaxbucket.testing.loss import check_loss
