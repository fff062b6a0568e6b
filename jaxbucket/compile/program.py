"""A function for arguments of fixed shapes, and what its executable costs."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, Literal, TypeAlias

import jax

from jaxbucket.base.buckets import Bucket
from jaxbucket.compile.flops import count_flops
from jaxbucket.compile.settings import following_prng

# Of a file's name, enough to find it by.
_DIGITS = 8
_WIDEST = 1000
# A bucket, or the name of a phase that all have in common.
Label: TypeAlias = Bucket | str


@dataclasses.dataclass(frozen=True)
class Program:
    """What is to be compiled.

    Attributes:
      label: the bucket it is for, or the phase.
      fn: a jitted function.
      args: its arguments, or their shapes, dtypes and shardings.
    """

    label: Label
    fn: Any
    args: tuple[Any, ...]

    @property
    def name(self) -> str:
        return getattr(self.fn, "__name__", "step")

    def lower(self) -> tuple[Any, int | None]:
        """Traces it; returns that, and how many operations it has."""
        # What a file keeps of this process is run by others.
        with following_prng():
            if not hasattr(self.fn, "trace"):
                return self.fn.lower(*self.args), None
            traced = self.fn.trace(*self.args)
            return traced.lower(), count_flops(traced.jaxpr)


@dataclasses.dataclass(frozen=True)
class ProgramReport:
    """What an executable took to make, and takes to run; bytes are those of a device.

    Attributes:
      name: the function's.
      label: the bucket's `[B, T]`, or the phase.
      source: "compiled", or "loaded" from a file.
      trace_seconds: until it was lowered; 0 where it was not traced.
      compile_seconds: in XLA, other programs beside it perhaps; of a loaded one, when
        it was compiled.
      load_seconds: 0 where it was compiled.
      argument_bytes: parameters, optimizer and batch.
      output_bytes: what it returns.
      aliased_bytes: the part of the outputs that takes the place of donated arguments.
      temporary_bytes: what is in between.
      flops: matrix products and convolutions of all devices, loops counted; None if
        it was not traced and no file says so.
      file: where it is kept, if it is.
    """

    name: str
    label: str
    source: Literal["compiled", "loaded"]
    trace_seconds: float
    compile_seconds: float
    load_seconds: float
    argument_bytes: int | None
    output_bytes: int | None
    aliased_bytes: int | None
    temporary_bytes: int | None
    flops: int | None
    file: str | None = None

    @property
    def seconds(self) -> float:
        """What this start waited for."""
        ready = self.compile_seconds if self.source == "compiled" else self.load_seconds
        return self.trace_seconds + ready

    @property
    def peak_bytes(self) -> int | None:
        """The most that a device holds at a time, the arguments in it."""
        parts = (self.argument_bytes, self.output_bytes, self.temporary_bytes)
        if None in parts:
            return None
        return sum(parts) - (self.aliased_bytes or 0)  # pyright: ignore

    @classmethod
    def from_dict(cls, fields: Any) -> ProgramReport:
        """Returns the report of which `dataclasses.asdict` made these fields.

        Raises:
          ValueError: if a field is missing, unknown or of another type.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(fields, dict) or fields.keys() != names:
            raise ValueError(f"`fields` must be a dict of {', '.join(sorted(names))}.")
        for name, value in fields.items():
            if not _is_valid(name, value):
                raise ValueError(f"`fields` has another type of value for {name!r}.")
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        """Every number, as plain Python."""
        return dataclasses.asdict(self) | {
            "seconds": self.seconds,
            "peak_bytes": self.peak_bytes,
        }


def _is_valid(name: str, value: Any) -> bool:
    """Whether a value read from a file may be that of a report's field."""
    if name == "source":
        return value in ("compiled", "loaded")
    if name == "file" and value is None:
        return True
    if name in ("name", "label", "file"):
        return isinstance(value, str)
    if isinstance(value, bool):
        return False
    if name.endswith("_seconds"):
        return isinstance(value, int | float) and 0 <= value < math.inf
    return value is None or (isinstance(value, int) and value >= 0)


def memory_of(executable: Any) -> dict[str, int | None]:
    """The bytes of a report, as far as the backend tells."""
    try:
        memory = executable.memory_analysis()
    except (NotImplementedError, jax.errors.JaxRuntimeError):
        memory = None
    names = {
        "argument_bytes": "argument_size_in_bytes",
        "output_bytes": "output_size_in_bytes",
        "aliased_bytes": "alias_size_in_bytes",
        "temporary_bytes": "temp_size_in_bytes",
    }
    return {own: getattr(memory, theirs, None) for own, theirs in names.items()}


@dataclasses.dataclass(frozen=True, repr=False)
class CompileReport:
    """What all programs of a step cost: `print` shows a table, `to_json` has it all.

    Attributes:
      programs: those that are ready, in the order they were given.
    """

    programs: tuple[ProgramReport, ...]

    @property
    def num_compiled(self) -> int:
        """How many XLA has compiled; the others were loaded."""
        return sum(program.source == "compiled" for program in self.programs)

    def to_dict(self) -> list[dict[str, Any]]:
        """Every number, as plain Python."""
        return [program.to_dict() for program in self.programs]

    def to_json(self) -> str:
        """Every number, as JSON."""
        return json.dumps(self.to_dict())

    def __repr__(self) -> str:
        return f"<{len(self.programs)} programs, {self.num_compiled} of them compiled>"

    def __str__(self) -> str:
        """The table as text, as wide as it is: no number is cut."""
        from rich.console import Console

        # What is printed without `rich` knows neither colors nor a terminal's width.
        console = Console(
            width=_WIDEST, color_system=None, force_terminal=False, force_jupyter=False
        )
        with console.capture() as text:
            console.print(self)
        return "\n".join(line.rstrip() for line in text.get().splitlines()).strip("\n")

    def __rich__(self) -> Any:
        """The report as a `rich` table, for a terminal."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(
            box=box.SIMPLE_HEAD,
            caption="Memory in MB of one device: arguments, outputs, temporaries, all. "
            "Operations are of all devices, loops counted.",
            caption_justify="left",
            padding=(0, 0, 0, 1),
            pad_edge=False,
        )
        table.add_column("program", no_wrap=True)
        # Short ones: a page has 100 characters, and no number is to be cut.
        for name in ("trace s", "XLA s", "args", "outputs", "temp", "peak", "GFLOP"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("file", no_wrap=True)
        for p in self.programs:
            table.add_row(
                Text(f"{p.name} {p.label}"),
                f"{p.trace_seconds:.2f}" if p.trace_seconds else "",
                "loaded" if p.source == "loaded" else f"{p.compile_seconds:.2f}",
                _megabytes(p.argument_bytes),
                _megabytes(p.output_bytes, p.aliased_bytes),
                _megabytes(p.temporary_bytes),
                _megabytes(p.peak_bytes),
                "" if p.flops is None else f"{p.flops / 1e9:.3g}",
                (p.file or "")[:_DIGITS],
            )
        return table


def _megabytes(size: int | None, less: int | None = 0) -> str:
    if size is None:
        return ""
    megabytes = (size - (less or 0)) / 1e6
    return f"{megabytes:.1f}" if megabytes < 1000 else f"{megabytes:.0f}"
