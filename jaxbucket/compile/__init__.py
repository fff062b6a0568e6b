"""One executable per bucket: compiled ahead, kept in files, guarded.

`steps` compiles a step for every bucket, in the threads of a `build` job, and takes
each batch to its executable; `executable_cache` keeps executables in files; `guard`
says what made XLA compile once more, and `recipes` compiles before a job begins.
"""

from etils import epy as _epy

with _epy.lazy_api_imports(globals()):
    from jaxbucket.compile.events import count_compiles
    from jaxbucket.compile.executable_cache import ExecutableCache
    from jaxbucket.compile.report import CompileReport, ProgramReport
    from jaxbucket.compile.steps import CompiledSteps, compile_steps
    from jaxbucket.compile.xla_cache import use_xla_cache
