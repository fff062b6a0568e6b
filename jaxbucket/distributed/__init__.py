"""The processes of one run: they start, agree, and stop together.

`rendezvous` and `handover` bring the processes together before jax connects them,
`processes` checks that they agree, `watchdog` ends all where one is lost, and `stop`
ends them behind the same step.
"""

from etils import epy as _epy

with _epy.lazy_api_imports(globals()):
    from jaxbucket.distributed.processes import Processes
    from jaxbucket.distributed.stop import StopRequest
