"""The cost of building and running executables: seconds, bytes and operations.

XLA's own count of operations (`compiled.cost_analysis()`) counts the body of a loop
once, so that a model of 32 layers in a `lax.scan` counts as one layer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any, Literal, cast

import jax
import numpy as np

from jaxbucket.base.table import Record, number_table
from jaxbucket.compile.collectives import Collective, count_collectives

# Characters of a file's name that the table shows.
_DIGITS = 6
_CAPTION = (
    "trace, XLA: seconds of tracing and compiling. MB on each device: args, donated: "
    "arguments, and the part of them that outputs reuse; out: other outputs; temp: "
    "temporary buffers; peak: args + out + temp, to be compared with the memory of a "
    "CPU or GPU; hbm: the peak that XLA reports on TPUs, where it refuses what does "
    "not fit. GFLOP: 1e9 operations of matrix products and convolutions, over all "
    "devices and loop iterations. file: the first characters of its name."
)
_COLLECTIVES_CAPTION = (
    "Collectives that each device runs in a step, and the MB of their results; + if "
    "there are more, in loops of unknown length."
)


@dataclasses.dataclass(frozen=True)
class ProgramReport:
    """The cost of building and running one executable. Bytes are per device.

    Attributes:
      name: the name of the function.
      label: the bucket's `[B, T]`, or the name of the phase.
      source: "compiled", or "loaded" from a file.
      trace_seconds: time to trace and lower the function.
      compile_seconds: time in XLA, possibly while other programs were compiled. For a
        loaded executable, the time when it was originally compiled.
      load_seconds: time to load it from a file; 0 if it was compiled.
      argument_bytes: size of the parameters, optimizer state and batch.
      output_bytes: size of the outputs.
      aliased_bytes: the part of the outputs that reuses donated arguments.
      temporary_bytes: size of the temporary buffers.
      hbm_bytes: the peak that XLA reports; None except on TPUs, because the values of
        other platforms leave buffers out.
      collectives: kind, such as "all-reduce" -> how many of them a device runs in a
        step; empty for a single device.
      flops: operations of matrix products and convolutions over all devices and loop
        iterations; None if unknown.
      file: the name of its file, or None if it has no file.
    """

    name: str
    label: str
    source: Literal["compiled", "loaded"] = "compiled"
    trace_seconds: float = 0.0
    compile_seconds: float = 0.0
    load_seconds: float = 0.0
    argument_bytes: int | None = None
    output_bytes: int | None = None
    aliased_bytes: int | None = None
    temporary_bytes: int | None = None
    hbm_bytes: int | None = None
    collectives: dict[str, Collective] = dataclasses.field(default_factory=dict)
    flops: int | None = None
    file: str | None = None

    @property
    def seconds(self) -> float:
        """Time to trace and then compile or load it, in this process."""
        ready = self.compile_seconds if self.source == "compiled" else self.load_seconds
        return self.trace_seconds + ready

    @property
    def peak_bytes(self) -> int | None:
        """The most memory that it needs at a time, arguments included."""
        parts = (self.argument_bytes, self.output_bytes, self.temporary_bytes)
        if None in parts:
            return None
        return sum(parts) - (self.aliased_bytes or 0)  # pyright: ignore

    def to_dict(self) -> dict[str, Any]:
        """Returns all numbers as plain Python values."""
        return dataclasses.asdict(self) | {
            "seconds": self.seconds,
            "peak_bytes": self.peak_bytes,
        }


def costs_of(executable: Any, args: Any) -> dict[str, Any]:
    """Returns the fields of a report that only the executable knows.

    Bytes are None where the backend reports no value.
    """
    try:
        memory = executable.memory_analysis()
    except (NotImplementedError, jax.errors.JaxRuntimeError):
        memory = None
    costs: dict[str, Any] = {
        "argument_bytes": getattr(memory, "argument_size_in_bytes", None),
        "output_bytes": getattr(memory, "output_size_in_bytes", None),
        "aliased_bytes": getattr(memory, "alias_size_in_bytes", None),
        "temporary_bytes": getattr(memory, "temp_size_in_bytes", None),
    }
    if memory is not None:
        # Arguments that a program does not use, such as the state of the optimizer in
        # an evaluation, are in memory as well.
        costs["argument_bytes"] = max(costs["argument_bytes"], shard_bytes(args))
    devices = devices_of(args)
    if devices[0].platform == "tpu":
        costs["hbm_bytes"] = getattr(memory, "peak_memory_in_bytes", None)
    if len(devices) > 1 and hasattr(executable, "as_text"):
        costs["collectives"] = count_collectives(executable.as_text())
    return costs


def devices_of(arguments: Any) -> tuple[Any, ...]:
    """Returns the devices, in order, on which programs with these arguments run."""
    devices: tuple[Any, ...] = ()
    for leaf in jax.tree.leaves(arguments):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, jax.sharding.NamedSharding):
            of_leaf = tuple(np.ravel(cast(np.ndarray, sharding.mesh.devices)))
        else:
            device_set = getattr(sharding, "device_set", ())
            of_leaf = tuple(sorted(device_set, key=lambda device: device.id))
        devices = max(devices, of_leaf, key=len)
    return devices or (jax.devices()[0],)


def shard_bytes(tree: Any) -> int:
    """Returns the size of arrays, or of their shapes, on each device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if hasattr(leaf, "sharding") and leaf.sharding is not None
    )


@dataclasses.dataclass(frozen=True, repr=False)
class CompileReport(Record):
    """The costs of all programs of a step function.

    `print(report)` prints a table, and `to_json` returns all numbers.

    Example:
      >>> program = ProgramReport(
      ...     "train_step", "[8, 4]", "compiled", trace_seconds=0.25,
      ...     compile_seconds=1.5, load_seconds=0.0, argument_bytes=3_000_000,
      ...     output_bytes=1_000_000, aliased_bytes=1_000_000,
      ...     temporary_bytes=2_000_000, flops=4_000_000_000,
      ... )
      >>> report = CompileReport((program,))
      >>> report.num_compiled, report.programs[0].peak_bytes
      (1, 5000000)
      >>> print("\\n".join(str(report).splitlines()[:3]))
      program            trace   XLA  args  donated  out  temp  peak  GFLOP
      ─────────────────────────────────────────────────────────────────────
      train_step [8, 4]   0.25  1.50   3.0      1.0  0.0   2.0   5.0      4

    Attributes:
      programs: the reports of the programs that are ready, in compilation order.
    """

    programs: tuple[ProgramReport, ...]

    @property
    def num_compiled(self) -> int:
        """The number of programs that XLA compiled; the others were loaded."""
        return sum(program.source == "compiled" for program in self.programs)

    def to_dict(self) -> list[dict[str, Any]]:
        """Returns all numbers as plain Python values."""
        return [program.to_dict() for program in self.programs]

    def __repr__(self) -> str:
        count = len(self.programs)
        return f"<CompileReport: {count} programs, {self.num_compiled} compiled>"

    @property
    def legends(self) -> tuple[str, ...]:
        return (_CAPTION, _COLLECTIVES_CAPTION)

    def __rich__(self) -> Any:
        """Returns the report as `rich` tables, which usually fit in 80 columns."""
        from rich.console import Group

        tables = [self._programs_table()]
        if any(program.collectives for program in self.programs):
            tables += ["", self._collectives_table()]
        return Group(*tables)

    def _programs_table(self) -> Any:
        # Short titles, so that the table fits in 80 columns.
        titles = ["trace", "XLA", "args", "donated", "out", "temp", "peak"]
        has_hbm = any(p.hbm_bytes is not None for p in self.programs)
        has_file = any(p.file for p in self.programs)
        titles += [*["hbm"] * has_hbm, "GFLOP", *["file"] * has_file]
        cells = (
            (
                f"{p.trace_seconds:.2f}",
                "loaded" if p.source == "loaded" else f"{p.compile_seconds:.2f}",
                _megabytes(p.argument_bytes),
                _megabytes(p.aliased_bytes),
                _megabytes(p.output_bytes, p.aliased_bytes),
                _megabytes(p.temporary_bytes),
                _megabytes(p.peak_bytes),
                *[_megabytes(p.hbm_bytes)] * has_hbm,
                "" if p.flops is None else _gigaflops(p.flops),
                *[(p.file or "")[:_DIGITS]] * has_file,
            )
            for p in self.programs
        )
        return self._table(titles, cells, _CAPTION)

    def _collectives_table(self) -> Any:
        kinds = sorted({kind for p in self.programs for kind in p.collectives})
        cells = (
            [_collective(p.collectives.get(kind)) for kind in kinds]
            for p in self.programs
        )
        return self._table(kinds, cells, _COLLECTIVES_CAPTION)

    def _table(self, titles: list[str], cells: Iterable[Any], caption: str) -> Any:
        """Returns a table with a row for each program."""
        rows = zip(self.programs, cells, strict=True)
        lines = ((f"{p.name} {p.label}", *row) for p, row in rows)
        return number_table(["program", *titles], lines, caption, named=True)


def _collective(found: Collective | None) -> str:
    if found is None:
        return ""
    more = "+" if found["is_lower_bound"] else ""
    return f"{found['count']}{more}: {_megabytes(found['bytes'])}{more}"


def _gigaflops(flops: int) -> str:
    gigaflops = flops / 1e9
    return f"{gigaflops:.0f}" if 1e3 <= gigaflops < 1e6 else f"{gigaflops:.3g}"


def _megabytes(size: int | None, aliased: int | None = 0) -> str:
    if size is None:
        return ""
    megabytes = (size - (aliased or 0)) / 1e6
    return f"{megabytes:.1f}" if megabytes < 1000 else f"{megabytes:.0f}"


def count_flops(jaxpr: Any) -> int:
    """Returns the floating-point operations of all matrix products and convolutions.

    The count covers the whole program on all devices: 2 * M * N * K for a product of
    `[M, K]` and `[K, N]`. The body of a `lax.scan`, or of a `fori_loop` with a known
    number of iterations, counts once per iteration. The body of a `while_loop` counts
    once, because its number of iterations is unknown. A `cond` counts as its largest
    branch, and a Pallas kernel as one cell of its grid. Other operations do not count.

    Args:
      jaxpr: a traced program, such as `jax.jit(f).trace(x).jaxpr`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> def power(x):
      ...     return jax.lax.fori_loop(0, 5, lambda _, y: y @ x, x)
      >>> count_flops(jax.jit(power).trace(jnp.ones((8, 8))).jaxpr) == 5 * 2 * 8**3
      True
    """
    # A ClosedJaxpr contains the program itself.
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return sum(map(_equation_flops, jaxpr.eqns))


def _equation_flops(equation: Any) -> int:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        left = equation.invars[0].aval.shape
        (contracted, _), _ = params["dimension_numbers"]
        depth = math.prod(left[axis] for axis in contracted)
        return 2 * math.prod(equation.outvars[0].aval.shape) * depth
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        # Each output is a sum over the kernel's window and the channels of its group.
        outputs = kernel[params["dimension_numbers"].rhs_spec[0]]
        window = math.prod(kernel) // max(outputs, 1)
        return 2 * math.prod(equation.outvars[0].aval.shape) * window
    inner = [count_flops(program) for program in _programs(params.values())]
    if name == "cond":
        return max(inner, default=0)
    if name == "scan":
        return params["length"] * sum(inner)
    if name == "shard_map":
        # The program inside is that of a single device.
        axes = params.get("manual_axes", params["mesh"].axis_names)
        return math.prod(params["mesh"].shape[axis] for axis in axes) * sum(inner)
    return sum(inner)


def _programs(values: Any) -> Iterator[Any]:
    for value in values:
        if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
            yield value
        elif isinstance(value, tuple | list):
            yield from _programs(value)
