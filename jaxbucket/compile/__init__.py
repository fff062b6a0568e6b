"""One executable per bucket, compiled ahead of time.

`steps` has a step function built for every bucket, by `build`, and dispatches each
batch to its executable. `executables` stores executables in files, and `recipes`
compiles before a job starts, for `absent` devices too. `fit` finds the largest batch
sizes that fit into memory.
"""

from jaxbucket.base.lazy import lazy_names as _lazy_names

with _lazy_names(globals()):
    from jaxbucket.compile.absent import absent_devices as absent_devices
    from jaxbucket.compile.events import count_compiles as count_compiles
    from jaxbucket.compile.executables import use_xla_cache as use_xla_cache
    from jaxbucket.compile.fit import fit_batch_sizes as fit_batch_sizes
    from jaxbucket.compile.report import CompileReport as CompileReport
    from jaxbucket.compile.report import ProgramReport as ProgramReport
    from jaxbucket.compile.steps import CompiledSteps as CompiledSteps
    from jaxbucket.compile.steps import compile_steps as compile_steps
