"""Processes that start, agree and stop together.

`processes` connects the processes of a run, compares them, exchanges strings, and ends
them together; `stop` stops all of them before the same step. They communicate through
the key-value store of jax's coordination service (`store`).
"""

from jaxbucket.base.lazy import lazy_names as _lazy_names

with _lazy_names(globals()):
    from jaxbucket.distributed.processes import Processes as Processes
    from jaxbucket.distributed.stop import StopRequest as StopRequest
