"""One executable per bucket: compiled ahead, kept in files, guarded."""

from jaxbucket.compile.build import CompileJob
from jaxbucket.compile.events import (
    compiling_as,
    count_compiles,
    record_arguments,
    record_call,
)
from jaxbucket.compile.executable_cache import ExecutableCache
from jaxbucket.compile.mismatch import check_is_batch
from jaxbucket.compile.options import CompileOptions
from jaxbucket.compile.program import Program
from jaxbucket.compile.report import CompileReport, ProgramReport
from jaxbucket.compile.settings import following_prng, trace_key
from jaxbucket.compile.steps import (
    CompiledSteps,
    compile_steps,
)
from jaxbucket.compile.xla_cache import use_xla_cache

__all__ = [
    "CompileJob",
    "CompileOptions",
    "CompileReport",
    "CompiledSteps",
    "ExecutableCache",
    "Program",
    "ProgramReport",
    "check_is_batch",
    "compile_steps",
    "compiling_as",
    "count_compiles",
    "following_prng",
    "record_call",
    "record_arguments",
    "trace_key",
    "use_xla_cache",
]
