"""The processes of one run: they start, agree, and stop together.

`processes` connects them and checks that they agree, `watchdog` ends all where one is
lost, and `stop` ends them before the same step. They meet in the `store` of jax's
coordination service.
"""

from etils import epy as _epy

with _epy.lazy_api_imports(globals()):
    from jaxbucket.distributed.processes import Processes
    from jaxbucket.distributed.stop import StopRequest
