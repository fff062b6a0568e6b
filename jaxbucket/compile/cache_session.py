"""What one start has to do with a folder of executables."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import pathlib
import pickle
import time
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import serialize_executable

from jaxbucket.compile import cache_file as files
from jaxbucket.compile import cache_key as keys
from jaxbucket.compile.executable_cache import ExecutableCache
from jaxbucket.compile.program import Label, Program
from jaxbucket.compile.report import ProgramReport
from jaxbucket.compile.xla_cache import may_lack_code

_EXECUTABLE, _LIST = ".executable", ".programs"
# How the code for a processor begins, on Linux and on a Mac.
_OBJECT_CODE = (b"\x7fELF", b"\xcf\xfa\xed\xfe")


class CacheSession:
    """One start: which files it finds, and which it leaves.

    Args:
      cache: the folder, and how to use it.
      programs: all that it needs.

    Attributes:
      devices: what they run on.
      platform: of these, such as "cpu".
      all_programs: in words that are the same in all processes.
    """

    def __init__(self, cache: ExecutableCache, programs: Sequence[Program]):
        self._cache = cache
        # Wherever the process goes meanwhile.
        self._folder = pathlib.Path(cache.folder).absolute()
        self.devices = keys.devices_of([program.args for program in programs])
        self.platform: str = self.devices[0].platform
        self._shared = keys.environment(self.devices) | {"key": cache.key}
        self._arguments = {p.label: keys.arguments(p) for p in programs}
        # In whichever order they are built.
        named = {str(label): words for label, words in self._arguments.items()}
        self._list_name = keys.digest([self._shared, named, keys.tracing(programs)])
        self.all_programs = keys.digest(list(map(keys.shapes, programs)))
        self._untraced = {id(program.fn) for program in programs}
        self._hashes: dict[Label, str] = {}
        self._outputs: dict[Label, Any] = {}
        # Programs that call back to Python are of no use to another one.
        self._of_this_process: set[Label] = set()
        self._used: set[str] = set()
        self._complains = True
        if cache.verify == "none":
            self._adopt(self._lists()[:1])

    def note(self, program: Program, lowered: Any) -> None:
        """Takes note of what a program is now."""
        text = keys.program_text(lowered)
        self._outputs[program.label] = lowered.out_tree
        if keys.calls_python(text):
            self._of_this_process.add(program.label)
            return
        self._hashes[program.label] = hashlib.sha256(text.encode()).hexdigest()
        was_last = self._untraced == {id(program.fn)}
        self._untraced.discard(id(program.fn))
        # Only now has each function shown what it is.
        if was_last and self._cache.verify == "one":
            traced = {str(label): x for label, x in self._hashes.items()}
            self._adopt(
                [x for x in self._lists() if traced.items() <= x.hashes.items()][:1]
            )

    def load(self, program: Program) -> tuple[Any, ProgramReport] | None:
        """Returns the executable of a program, if it is known and there."""
        if program.label not in self._hashes:
            return None
        path, start = self._path(program), time.perf_counter()
        try:
            kept = files.read(path)
            if kept is None:
                return None
            report = self._report(kept, program)
            executable = self._loaded(kept, program)
        except files.BadFileError as error:
            self._warn(f"{path} {error}: it is compiled anew.")
            return None
        self._use(path)
        report = dataclasses.replace(
            report,
            source="loaded",
            trace_seconds=0.0,
            load_seconds=time.perf_counter() - start,
            file=path.name,
        )
        return executable, report

    def save(
        self, program: Program, executable: Any, report: ProgramReport
    ) -> ProgramReport:
        """Writes an executable to its file; returns the report with that, if it can."""
        if program.label in self._of_this_process:
            self._warn(
                f"{report.name} {report.label} is not kept in a file, for it calls "
                "back to Python, as `jax.debug.print` does: it is compiled each time."
            )
            return report
        path = self._path(program)
        kept_report = dataclasses.replace(report, file=path.name)
        try:
            body = _dumped((path.name, executable))
            if may_lack_code(self.platform) and not any(
                x in body for x in _OBJECT_CODE
            ):
                raise ValueError("jax's own cache had it, and it has no code any more.")
        # What cannot be pickled says so in many ways.
        except Exception as error:
            self._warn(
                f"{report.name} {report.label} cannot be kept in a file, for it has "
                f"something that cannot be serialised: {error}"
            )
            return report
        header = {"key": self._key(program), "report": dataclasses.asdict(kept_report)}
        if self._write(path, files.Kept(header, body)):
            return kept_report
        return report

    def finish(self) -> None:
        """Writes the list of all programs, once all are known."""
        if self._hashes.keys() < self._arguments.keys():
            return
        hashes = {str(label): x for label, x in self._hashes.items()}
        path = self._folder / f"{self._list_name}-{keys.digest(hashes)}{_LIST}"
        # Once used, it is the last one, which "none" takes.
        self._use(path)
        if not path.exists() or _is_bad(path):
            header = {"list": self._list_name, "programs": hashes}
            self._write(path, files.Kept(header, b""))

    def _use(self, path: pathlib.Path) -> None:
        """It stays, and is the last one used."""
        self._used.add(path.name)
        files.touch(path)

    def _adopt(self, lists: list[_List]) -> None:
        for found in lists:
            self._use(found.path)
            for label in self._arguments:
                self._hashes[label] = found.hashes[str(label)]

    def _lists(self) -> list[_List]:
        """What earlier starts for the same arguments were, the last one first."""
        found: list[_List] = []
        for path in self._folder.glob(f"{self._list_name}-*{_LIST}"):
            try:
                last_use = path.stat().st_mtime_ns
                kept = files.read(path)
                if kept is not None:
                    found.append(_List(last_use, path, self._hashes_in(kept)))
            except OSError as error:
                if not isinstance(error, FileNotFoundError):
                    self._warn(f"{path} cannot be read: {error}: it is left out.")
            except files.BadFileError as error:
                self._warn(f"{path} {error}: all programs are traced.")
        return sorted(found, key=lambda x: -x.last_use)

    def _hashes_in(self, kept: files.Kept) -> dict[str, str]:
        hashes = kept.header.get("programs")
        labels = set(map(str, self._arguments))
        is_own = kept.header.get("list") == self._list_name
        if not is_own or not isinstance(hashes, dict) or hashes.keys() != labels:
            raise files.BadFileError("is of other programs than its name says")
        if not all(isinstance(x, str) for x in hashes.values()):
            raise files.BadFileError("has a hash that is not a string")
        return hashes

    def _key(self, program: Program) -> dict[str, Any]:
        return {
            **self._shared,
            **self._arguments[program.label],
            "program": self._hashes[program.label],
        }

    def _path(self, program: Program) -> pathlib.Path:
        return self._folder / f"{keys.digest(self._key(program))}{_EXECUTABLE}"

    def _report(self, kept: files.Kept, program: Program) -> ProgramReport:
        if kept.header.get("key") != self._key(program):
            raise files.BadFileError("is of another program than its name says")
        try:
            return ProgramReport.from_dict(kept.header.get("report"))
        except ValueError:
            raise files.BadFileError("is of another version") from None

    def _loaded(self, kept: files.Kept, program: Program) -> Any:
        try:
            name, executable = _Unpickler(io.BytesIO(kept.body), self.devices).load()
            has_arguments = executable.in_tree == jax.tree.structure((program.args, {}))
            # Of objects that are printed alike; without tracing nobody knows them.
            outputs = self._outputs.get(program.label, executable.out_tree)
            has_outputs = executable.out_tree == outputs
        # XLA and pickle refuse in many ways, and none is a reason to stop.
        except (Exception, SystemExit) as error:
            raise files.BadFileError(
                f"cannot be loaded: {type(error).__name__}: {error}"
            ) from None
        if name != self._path(program).name:
            raise files.BadFileError("has the executable of another program")
        if not has_arguments:
            raise files.BadFileError("has other constants in its arguments")
        if not has_outputs:
            raise files.BadFileError("has other constants in what it returns")
        return executable

    def _write(self, path: pathlib.Path, kept: files.Kept) -> bool:
        try:
            files.write(path, kept)
            self._used.add(path.name)
            bound = int(self._cache.max_gb * 1e9)
            suffixes = (_EXECUTABLE, _LIST)
            total = files.clean_up(self._folder, suffixes, bound, self._used)
        except OSError as error:
            if self._complains:
                self._warn(
                    f"Executables are not kept: {path} cannot be written: {error}. "
                    "Make room, or name another folder."
                )
            self._complains = False
            return False
        if total > bound and self._complains:
            self._warn(
                f"`max_gb={self._cache.max_gb}` is less than the {total / 1e9:.3g} GB "
                "of this start alone: give more."
            )
            self._complains = False
        return True

    def _warn(self, message: str) -> None:
        warnings.warn(message, RuntimeWarning, stacklevel=2)


class _List(NamedTuple):
    """A file that says which programs were lowered for one start.

    Attributes:
      last_use: in nanoseconds.
      path: of the file.
      hashes: label -> that of the program.
    """

    last_use: int
    path: pathlib.Path
    hashes: dict[str, str]


def _is_bad(path: pathlib.Path) -> bool:
    try:
        return files.read(path) is None
    except files.BadFileError:
        return True


def _dumped(executable: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(executable)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """Of whatever holds executables, such as the two of a pmap step."""

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
