"""One executable per bucket, compiled ahead of time.

`steps` compiles a step function for every bucket, in the threads of a `build` job, and
dispatches each batch to its executable. `executable_cache` stores executables in files,
`guard` reports unplanned compilations, and `recipes` compiles before a job starts.
"""

from etils import epy as _epy

with _epy.lazy_api_imports(globals()):
    from jaxbucket.compile.events import count_compiles
    from jaxbucket.compile.executable_cache import ExecutableCache
    from jaxbucket.compile.report import CompileReport, ProgramReport
    from jaxbucket.compile.steps import CompiledSteps, compile_steps
    from jaxbucket.compile.xla_cache import use_xla_cache
