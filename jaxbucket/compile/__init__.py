"""One executable per bucket: compiled ahead, kept in files, guarded."""

from jaxbucket.compile.agreement import leave_all
from jaxbucket.compile.build import Building
from jaxbucket.compile.events import (
    compiling_as,
    count_compiles,
    note_arguments,
    noting_arguments,
)
from jaxbucket.compile.executable_cache import ExecutableCache
from jaxbucket.compile.mismatch import check_is_batch
from jaxbucket.compile.program import CompileReport, Program, ProgramReport
from jaxbucket.compile.settings import following_prng, trace_key
from jaxbucket.compile.steps import (
    CompiledSteps,
    CompileOptions,
    check_step,
    compile_by,
    compile_steps,
    shown,
)
from jaxbucket.compile.xla_cache import use_xla_cache

__all__ = [
    "Building",
    "CompileOptions",
    "CompileReport",
    "CompiledSteps",
    "ExecutableCache",
    "Program",
    "ProgramReport",
    "check_is_batch",
    "check_step",
    "compile_by",
    "compile_steps",
    "compiling_as",
    "count_compiles",
    "following_prng",
    "leave_all",
    "note_arguments",
    "noting_arguments",
    "shown",
    "trace_key",
    "use_xla_cache",
]
