"""Loads and saves the executables of a run.

Besides executables, the folder contains manifests. Each records the programs that were
lowered for one run, so that the next run need not trace all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import logging
import os
import pathlib
import pickle
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import serialize_executable

from jaxbucket.compile import cache_file as files
from jaxbucket.compile import cache_key as keys
from jaxbucket.compile.cache_file import BadFileError
from jaxbucket.compile.cache_miss import why_missing
from jaxbucket.compile.canonical import digest
from jaxbucket.compile.executable_cache import ExecutableCache
from jaxbucket.compile.program import Label, Program
from jaxbucket.compile.report import ProgramReport
from jaxbucket.compile.xla_cache import may_lack_code

_EXECUTABLE, _MANIFEST = ".executable", ".programs"
# The first bytes of machine code, on Linux and on macOS.
_OBJECT_CODE = (b"\x7fELF", b"\xcf\xfa\xed\xfe")
# Not a warning, which may be an error: after a change of the code nothing is wrong.
_log_once = functools.cache(logging.getLogger(__name__).warning)


class CacheSession:
    """The files that one run loads and saves.

    Args:
      cache: the folder and its options.
      programs: all programs of the run.

    Attributes:
      devices: the devices on which the programs run.
      platform: the platform of the devices, such as "cpu".
      all_programs: a digest of the names and shapes of all programs, which is the same
        in all processes.
    """

    def __init__(self, cache: ExecutableCache, programs: Sequence[Program]):
        self._cache = cache
        # Absolute, because the process may change its working directory later.
        self._folder = pathlib.Path(cache.folder).absolute()
        self.devices = keys.devices_of([program.args for program in programs])
        self.platform: str = self.devices[0].platform
        self._environment = keys.environment(self.devices) | {"key": cache.key}
        self._arguments = {p.label: keys.arguments(p) for p in programs}
        # The digest sorts keys, so that the order of the programs does not matter.
        by_name = {str(label): args for label, args in self._arguments.items()}
        environment = digest(self._environment)
        rest = [by_name, keys.tracing(programs)]
        self._manifest_name = f"{environment}-{digest(rest)}"
        facts = self._environment | dict(by_name[min(by_name)]["arguments"])
        facts = {x: f"{x} {y or 'unset'}" for x, y in facts.items()}
        count = jax.process_count()
        facts["processes"] = f"{count} process{'es' * (count > 1)}"
        functions = sorted({program.name for program in programs})
        self._manifest: dict[str, Any] = {"functions": functions, "facts": facts}
        self.all_programs = digest(list(map(keys.shapes, programs)))
        self._untraced = {id(program.fn) for program in programs}
        self._hashes: dict[str, str] = {}
        self._outputs: dict[Label, Any] = {}
        # Programs that call Python functions cannot be loaded by another process.
        self._with_callbacks: set[Label] = set()
        self._used: set[str] = set()
        self._has_warned = False
        self._is_miss_new = True
        if not any(self._folder.glob(f"{environment}-*")):
            self._explain_miss()
        if cache.verify == "none":
            self._adopt_last_manifest()

    def record(self, program: Program, lowered: Any) -> None:
        """Records a program that has been lowered, before it is loaded or saved."""
        text = keys.program_text(lowered)
        self._outputs[program.label] = lowered.out_tree
        if keys.calls_python(text):
            self._with_callbacks.add(program.label)
            return
        self._hashes[str(program.label)] = hashlib.sha256(text.encode()).hexdigest()
        was_last = self._untraced == {id(program.fn)}
        self._untraced.discard(id(program.fn))
        # One program of each function has been traced now.
        if was_last and self._cache.verify == "one":
            self._adopt_last_manifest()

    def load(self, program: Program) -> tuple[Any, ProgramReport] | None:
        """Returns the executable of a recorded program and its report, or None."""
        if str(program.label) not in self._hashes:
            return None
        path, start = self._path(program), time.perf_counter()
        try:
            body = files.read(path)
            if body is None:
                return None
            report, executable = self._deserialize(body, program)
        except BadFileError as error:
            _warn(f"{path} {error}. The program is compiled again.")
            return None
        self._use(path)
        self._is_miss_new = False
        seconds = time.perf_counter() - start
        return executable, dataclasses.replace(
            report, source="loaded", trace_seconds=0.0, load_seconds=seconds
        )

    def save(
        self, program: Program, executable: Any, report: ProgramReport
    ) -> ProgramReport:
        """Writes an executable to a file; returns the report, with its file if any."""
        name = f"{report.name} {report.label}"
        if program.label in self._with_callbacks:
            _warn(
                f"{name} is not saved to a file, because it calls Python functions, as "
                "`jax.debug.print` does. It will be compiled in every run."
            )
            return report
        path = self._path(program)
        saved = dataclasses.replace(report, file=path.name)
        try:
            code = _dump(executable)
            if may_lack_code(self.platform) and not any(
                x in code for x in _OBJECT_CODE
            ):
                raise ValueError("jax's own cache returned it without its code.")
        # Pickling fails in many ways.
        except Exception as error:
            _warn(
                f"{name} cannot be saved to a file, because it cannot be serialized: "
                f"{error}. `compile_steps(..., xla_cache=folder)` also keeps the code "
                "of steps whose state contains functions, such as Flax's `TrainState`."
            )
            return report
        is_saved = self._write(path, pickle.dumps(dataclasses.asdict(saved)) + code)
        return saved if is_saved else report

    def finish(self) -> None:
        """Writes the manifest, if all programs have been recorded."""
        if self._hashes.keys() < set(map(str, self._arguments)):
            return
        self._manifest["programs"] = self._hashes
        if self._is_miss_new:
            self._explain_miss()
        body = json.dumps(self._manifest, sort_keys=True).encode()
        path = self._manifest_path(body)
        # `verify="none"` uses the most recently used manifest.
        self._use(path)
        try:
            is_written = files.read(path) == body
        except BadFileError:
            is_written = False
        if not is_written:
            self._write(path, body)

    def _explain_miss(self) -> None:
        """Says once why none of the folder's programs of these functions was found."""
        self._is_miss_new = False
        saved = []
        for path in self._folder.glob(f"*{_MANIFEST}"):
            with contextlib.suppress(BadFileError):
                saved.append(json.loads(files.read(path) or b"{}"))
        functions = self._manifest["functions"]
        saved = [x for x in saved if x.get("functions") == functions]
        # If it has this manifest, files have been removed, or are written right now.
        if saved and self._manifest not in saved and jax.process_index() == 0:
            why = why_missing(saved, self._manifest["facts"])
            _log_once(f"{self._folder} has none of this job's programs, only {why}.")

    def _use(self, path: pathlib.Path) -> None:
        """Marks a file as used, so that it is not removed."""
        self._used.add(path.name)
        files.touch(path)

    def _adopt_last_manifest(self) -> None:
        """Adopts the latest manifest that contains the programs recorded so far."""
        paths = self._folder.glob(f"{self._manifest_name}-*{_MANIFEST}")
        for path in sorted(paths, key=files.last_use, reverse=True):
            try:
                body = files.read(path)
                if body is not None and path != self._manifest_path(body):
                    raise BadFileError(
                        "does not match its name: it lists different programs"
                    )
            except BadFileError as error:
                _warn(f"{path} {error}. All programs are traced.")
                continue
            hashes = json.loads(body or b"{}").get("programs")
            if hashes and self._hashes.items() <= hashes.items():
                self._hashes = hashes
                self._use(path)
                return

    def _manifest_path(self, body: bytes) -> pathlib.Path:
        content = hashlib.sha256(body).hexdigest()[:32]
        return self._folder / f"{self._manifest_name}-{content}{_MANIFEST}"

    def _path(self, program: Program) -> pathlib.Path:
        label = program.label
        fields = self._arguments[label] | {"program": self._hashes[str(label)]}
        return self._folder / f"{digest(self._environment | fields)}{_EXECUTABLE}"

    def _deserialize(self, body: bytes, program: Program) -> tuple[ProgramReport, Any]:
        file = io.BytesIO(body)
        try:
            report = ProgramReport(**pickle.load(file))
            if report.file != self._path(program).name:
                raise BadFileError(
                    "does not match its name: it contains a different program"
                )
            executable = _Unpickler(file, self.devices).load()
            has_arguments = executable.in_tree == jax.tree.structure((program.args, {}))
            # The key cannot distinguish all objects. Untraced outputs are unknown.
            outputs = self._outputs.get(program.label, executable.out_tree)
            has_outputs = executable.out_tree == outputs
        except BadFileError:
            raise
        # XLA and pickle raise many types of errors, none of which must end the job.
        except (Exception, SystemExit) as error:
            raise BadFileError(
                f"cannot be loaded: {type(error).__name__}: {error}"
            ) from None
        if not has_arguments:
            raise BadFileError("has different constants in its arguments")
        if not has_outputs:
            raise BadFileError("has different constants in its outputs")
        return report, executable

    def _write(self, path: pathlib.Path, body: bytes) -> bool:
        max_bytes = int(self._cache.max_gb * 1e9)
        try:
            files.write(path, body)
            self._used.add(path.name)
            total = files.clean_up(
                self._folder, (_EXECUTABLE, _MANIFEST), max_bytes, self._used
            )
        except OSError as error:
            self._warn_once(
                f"Executables are not saved: {path} cannot be written: {error}. Free "
                "disk space, or choose a different folder."
            )
            return False
        if total > max_bytes:
            self._warn_once(
                f"`max_gb={self._cache.max_gb}` is less than the {total / 1e9:.3g} GB "
                "that this run needs. Raise `max_gb`."
            )
        return True

    def _warn_once(self, message: str) -> None:
        """Warns about the folder, but only once."""
        if not self._has_warned:
            _warn(message)
        self._has_warned = True


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def _dump(executable: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(executable)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """Pickles objects that contain executables, such as the two of a pmap step."""

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, jax.stages.Compiled):
            return serialize_executable.serialize(obj)
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, devices: keys.Devices):
        super().__init__(file)
        self._load = functools.partial(
            serialize_executable.deserialize_and_load,
            backend=devices[0].client,
            execution_devices=devices,
        )

    def persistent_load(self, pid: Any) -> Any:
        return self._load(*pid)

    def find_class(self, module: str, name: str) -> Any:
        return super().find_class("__main__" if _is_script(module) else module, name)


def _is_script(module: str) -> bool:
    """Returns whether importing a module would run the script of this process again.

    A class of `train.py` is `__main__.Model` in the job, and `train.Model` in files of
    `jaxbucket precompile --recipe train:steps`.
    """
    path, _ = os.path.splitext(getattr(sys.modules["__main__"], "__file__", None) or "")
    is_loaded = module in sys.modules
    return not is_loaded and path.endswith(os.sep + module.replace(".", os.sep))
