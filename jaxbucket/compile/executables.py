"""Files of executables: one for each program and process.

The name of a file is a digest of everything that its executable depends on: the lowered
program, the versions, the devices, the process, the options of the compiler and the
user's key. If any of these has changed, there is no file of that name, and the program
is compiled. Unlike jax's own compilation cache (`use_xla_cache`), a folder can be
filled before a job starts, and serves several processes on CPUs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
import pathlib
import pickle
import platform
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jaxlib
from jax.experimental.compilation_cache import compilation_cache
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from jaxbucket.base.digest import digest
from jaxbucket.base.files import complete
from jaxbucket.base.version import __version__
from jaxbucket.compile.report import ProgramReport, devices_of

_SUFFIX = ".executable"
# What else the compiler depends on. The lowered program contains all other options.
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_COMPILER_OPTIONS = (
    *("jax_use_shardy_partitioner", "jax_disable_most_optimizations"),
    *("jax_optimization_level", "jax_exec_time_optimization_effort"),
    *("jax_memory_fitting_level", "jax_memory_fitting_effort"),
    *("jax_compiler_enable_remat_pass", "jax_xla_profile_version"),
    *("jax_enable_pgle", "jax_pgle_profiling_runs"),
)
# How calls of Python functions, such as `jax.debug.print`, look in a lowered program.
_PYTHON_CALLS = ("python_cpu_callback", "python_gpu_callback", "is_host_transfer = t")
# The first bytes of machine code, on Linux and on macOS.
_MACHINE_CODE = (b"\x7fELF", b"\xcf\xfa\xed\xfe")
# Type checkers do not know its attributes.
_config: Any = jax.config
_MAX_LENGTH, _MAX_FACTS = 80, 3
# Not a warning, which may be an error: after a change of the code nothing is wrong.
_log_once = functools.cache(logging.getLogger(__name__).warning)


class Executables:
    """The files that one call of `compile_steps` loads and saves.

    A lowered program may have several `stages`, each a `jax.stages.Lowered`, and a
    function `join` that makes its executable of theirs.

    Attributes:
      platform: the platform of the devices, such as "cpu".
    """

    def __init__(self, folder: str | os.PathLike[str], key: str, arguments: Any):
        self._folder = pathlib.Path(folder)
        self._devices = devices_of(arguments)
        self.platform: str = self._devices[0].platform
        self._facts = _facts(self._devices, key)
        self._has_loaded = False
        # The names of the files that this run saves -> the names of their functions.
        self._saved: dict[str, str] = {}

    def path(self, lowered: Any) -> pathlib.Path:
        """Returns the path of the file of a lowered program, which may not exist."""
        devices = [f"{device.device_kind} {device.id}" for device in self._devices]
        stages = [_description(stage) for stage in _stages(lowered)]
        key = [self._facts, jax.process_index(), devices, stages]
        return self._folder / f"{digest(json.dumps(key).encode())}{_SUFFIX}"

    def load(
        self, path: pathlib.Path, lowered: Any, report: ProgramReport
    ) -> tuple[Any, ProgramReport] | None:
        """Returns the executable in a file, and the report with its costs.

        Returns None if there is no file, or if it cannot be loaded, with a warning.
        """
        start = time.perf_counter()
        try:
            checksum, _, content = path.read_bytes().partition(b"\n")
            if checksum != _file_digest(path, content):
                raise ValueError("it is damaged, or not from jaxbucket")
            header, _, body = content.partition(b"\n")
            costs = ProgramReport(**json.loads(header)["report"])
            stages = [
                deserialize_and_load(
                    *(code, jax.tree.structure(stage.args_info), stage.out_tree),
                    backend=self._devices[0].client,
                    execution_devices=self._devices,
                )
                for code, stage in zip(
                    pickle.loads(body), _stages(lowered), strict=True
                )
            ]
        except FileNotFoundError:
            return None
        # XLA and pickle raise many types of errors, none of which must end the job.
        except Exception as error:
            _warn(f"{path} cannot be loaded: {error}. The program is compiled again.")
            return None
        self._has_loaded = True
        executable = lowered.join(*stages) if hasattr(lowered, "join") else stages[0]
        return executable, dataclasses.replace(
            costs,
            name=report.name,
            label=report.label,
            source="loaded",
            trace_seconds=report.trace_seconds,
            load_seconds=time.perf_counter() - start,
        )

    def save(
        self, path: pathlib.Path, lowered: Any, executable: Any, report: ProgramReport
    ) -> ProgramReport:
        """Saves an executable; returns the report, which then names the file.

        Warns if the executable cannot be saved.
        """
        self._saved[path.name] = report.name
        saved = dataclasses.replace(report, file=path.name)
        header = {
            "facts": self._facts,
            "process": jax.process_index(),
            "report": dataclasses.asdict(saved),
        }
        try:
            body = pickle.dumps(self._codes(lowered, executable))
            content = json.dumps(header).encode() + b"\n" + body
            # Other processes may write the same file.
            with complete(path) as draft:
                draft.write_bytes(_file_digest(path, content) + b"\n" + content)
            return saved
        except OSError as error:
            # The same text for all programs, so that Python shows it once.
            _warn(
                f"Executables are not saved, because {self._folder} cannot be written: "
                f"{error.strerror}. Free disk space, or choose a different folder."
            )
        # Serializing fails in many ways.
        except Exception as error:
            _warn(f"{report.name} {report.label} is not saved to a file: {error}")
        return report

    def explain_miss(self) -> None:
        """Says once why none of the folder's programs of these functions was found."""
        if self._has_loaded or jax.process_index() != 0:
            return
        others = []
        for path in self._folder.glob(f"*{_SUFFIX}"):
            # Files that are damaged, or not ours, explain nothing.
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
                with path.open("rb") as file:
                    file.readline()
                    header = json.loads(file.readline())
                is_same = header["report"]["name"] in self._saved.values()
                # Other processes save files at this moment.
                if is_same and header["process"] == 0 and path.name not in self._saved:
                    others.append(header["facts"])
        if others:
            why = _difference(others, self._facts)
            _log_once(f"{self._folder} has none of this job's programs, only {why}.")

    def _codes(self, lowered: Any, executable: Any) -> list[bytes]:
        """Returns the serialized stages of an executable."""
        if any(x in y.as_text() for x in _PYTHON_CALLS for y in _stages(lowered)):
            raise ValueError(
                "it calls Python functions of this process, as `jax.debug.print` does."
            )
        codes = [serialize(stage)[0] for stage in _stages(executable)]
        may_lack_code = self.platform == "cpu" and _config.jax_compilation_cache_dir
        if may_lack_code and not any(x in y for x in _MACHINE_CODE for y in codes):
            raise ValueError(
                "jax's compilation cache returned it without its code. Compile a step "
                "before it is called."
            )
        return codes


def make_writable(folder: str | os.PathLike[str]) -> None:
    """Creates a folder, or raises the OSError of writing a file to it."""
    os.makedirs(folder, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()


def _stages(program: Any) -> Sequence[Any]:
    return getattr(program, "stages", (program,))


def _description(lowered: jax.stages.Lowered) -> list[Any]:
    """Returns everything that a lowered program consists of."""
    module: Any = lowered.compiler_ir()
    functions = {str(x.attributes["sym_name"]): x for x in module.body.operations}
    # The text leaves unused arguments out, and does not name the others.
    arguments = functions['"main"'].regions[0].blocks[0].arguments
    names = [str(argument.location) for argument in arguments]
    # With weak types, and which arguments are donated.
    shapes = [repr(x) for x in jax.tree.leaves(lowered.args_info)]
    # jax has no public access to the compiler options of `jax.jit`.
    inner = getattr(lowered, "_lowering", None)
    options = str(getattr(inner, "_compiler_options_kvs", None))
    return [lowered.as_text(), names, shapes, options]


def _facts(devices: Sequence[Any], key: str) -> dict[str, str]:
    """Returns what all executables of a run depend on, as parts of a sentence."""
    count = jax.process_count()
    kinds = ", ".join(sorted({device.device_kind for device in devices}))
    facts = {
        "processes": f"{count} process{'es' * (count > 1)}",
        "jax": f"jax {jax.__version__}",
        "jaxlib": f"jaxlib {jaxlib.version.__version__}",
        "jaxbucket": f"jaxbucket {__version__}",
        "devices": f"{len(devices)} devices of kind {kinds}",
        "platform": f"platform version {devices[0].client.platform_version}",
        "key": f"key {key!r}",
    }
    if devices[0].platform == "cpu":
        # XLA generates code for the exact processor.
        facts["processor"] = f"processor {_processor()}"
    for name in _VARIABLES:
        facts[name] = f"{name} {os.environ.get(name) or 'unset'}"
    for name in _COMPILER_OPTIONS:
        # Those of the process, because threads compile.
        facts[name] = f"{name} {_config.values.get(name, 'unset')}"
    return facts


def _processor() -> str:
    """Returns the architecture of the CPU and a digest of its instruction sets."""
    flags = platform.processor()
    with contextlib.suppress(OSError):
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        flags = next((x for x in lines if x.startswith(("flags", "Features"))), flags)
    return f"{platform.machine()} {digest(flags.encode())[:8]}"


def _difference(others: Sequence[dict[str, str]], facts: dict[str, str]) -> str:
    """Returns how a job differs from the one of the most similar files.

    Example:
      >>> one = {"processes": "1 process", "jax": "jax 0.12.0"}
      >>> _difference([one], one | {"processes": "2 processes"})
      '1 program for 1 process; this job has 2 processes'
    """

    def differing(other: dict[str, str]) -> list[str]:
        return [x for x in facts if facts[x] != other.get(x)]

    closest = min(others, key=lambda other: len(differing(other)))
    count, names = others.count(closest), differing(closest)[:_MAX_FACTS]
    programs = f"{count} program{'s' * (count > 1)}"
    if not names:
        return f"{programs} of a different code or of different shapes"
    had, has = (
        ", ".join(x.get(name, "")[:_MAX_LENGTH] for name in names)
        for x in (closest, facts)
    )
    return f"{programs} for {had}; this job has {has}"


def _file_digest(path: pathlib.Path, content: bytes) -> bytes:
    # With the name, so that a renamed file is not taken for another program.
    return digest(path.name.encode(), content).encode()


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def use_xla_cache(folder: str | os.PathLike[str]) -> None:
    """Stores everything that XLA compiles from now on in a folder.

    It turns on jax's own compilation cache, for programs of every size. The cache saves
    the time of XLA, but not of tracing.

    Example:
      >>> jb.compile.use_xla_cache("/shared/xla")  # doctest: +SKIP

    Args:
      folder: the folder of the cache.
    """
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_compilation_cache_dir", os.fspath(folder))
    # An earlier compilation has recorded that there is no cache, or another one.
    compilation_cache.reset_cache()


@contextlib.contextmanager
def without_xla_cache() -> Iterator[None]:
    """Turns jax's compilation cache off inside a `with` block.

    A CPU executable that was loaded from that cache does not contain its code when it
    is serialized again: it can be loaded, but fails when it runs.
    """
    before = _config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()
