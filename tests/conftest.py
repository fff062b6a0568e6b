"""Fixtures for all tests, which run on eight virtual devices.

Dtype promotion is strict.
"""

import gc
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

# These variables are set before jax is imported, because its backend reads them once.
# Programs are compiled in one piece: with few cores, threads only wait for each other.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    " --xla_cpu_parallel_codegen_split_count=1"
)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import pytest

from jaxbucket import BucketPlan, plan_buckets
from jaxbucket.plan.costs import StepTime

jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_collection_finish() -> None:
    """Lets the garbage collector leave out imported modules and collected tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def quick_compilation(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Lets tests, and the processes that they start, compile quickly.

    They share a compilation cache, with those of other workers of pytest-xdist too, and
    have no slow XLA optimizations.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    folder /= "compiled"
    options = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        "jax_disable_most_optimizations": True,
    }
    for name, value in options.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)


@pytest.fixture
def jsonl(tmp_path: pathlib.Path) -> pathlib.Path:
    """A file of 200 documents of several lengths, in the field "body"."""
    path = tmp_path / "data.jsonl"
    lines = [
        json.dumps({"body": f"document {n} " + "x" * (n % 90)}) for n in range(200)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


LAUNCH = pathlib.Path(__file__).parents[1] / "scripts" / "launch_local.py"


# Each process writes to its own file, because their standard outputs may interleave
# within a line.
_RECORD = """
import os, sys
def record(*words):
    with open(sys.argv[0] + ".recorded." + os.environ["JAX_PROCESS_ID"], "a") as file:
        print(*words, file=file)
"""


class Launched(NamedTuple):
    """The result of running a script in several processes."""

    status: int
    output: str
    script: pathlib.Path

    def recorded(self, index: int) -> list[str]:
        """Returns the lines that a process has written with `record`."""
        path = pathlib.Path(f"{self.script}.recorded.{index}")
        return path.read_text().splitlines() if path.exists() else []

    def lines(self, index: int) -> list[str]:
        """Returns the lines that a process has printed."""
        prefix = f"[{index}] "
        lines = [line for line in self.output.splitlines() if line.startswith(prefix)]
        return [line.removeprefix(prefix) for line in lines]


@pytest.fixture(name="launch")
def launch_fixture(tmp_path: pathlib.Path) -> Callable[..., Launched]:
    """Returns a function that runs a script in `count` processes.

    Each process has `devices` virtual devices.
    """

    def launch(
        code: str, *, count: int = 2, devices: int = 1, grace: float = 6
    ) -> Launched:
        for old in tmp_path.glob("script.py*"):
            old.unlink()
        script = tmp_path / "script.py"
        script.write_text(_RECORD + code)
        run = subprocess.run(
            [
                *(sys.executable, str(LAUNCH), "-n", str(count), "-d", str(devices)),
                *("--grace", str(grace), "--", sys.executable, str(script)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=200,
            check=False,
        )
        return Launched(run.returncode, run.stdout, script)

    return launch


@pytest.fixture
def python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Returns a function that runs Python with arguments, and checks how it ends."""

    def run(
        *arguments: object, status: int = 0, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            **options,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done

    return run


# Files of real lengths, if present next to the repository.
DATA = pathlib.Path(__file__).parents[2] / "shared" / "data"
# All other length sets are used only by the exhaustive tests.
QUICK_SETS = ("gsm8k-answer_bytes", "multi30k-en_words")
NUM_PROBLEMS, QUICK_PROBLEMS = 24, 9


def real_length_sets() -> list[tuple[str, np.ndarray]]:
    """Returns (name, positive lengths) for every column of every file."""
    sets = []
    for path in sorted(DATA.glob("*.npz")):
        with np.load(path) as columns:
            for name in columns.files:
                lengths = columns[name]
                sets.append((f"{path.stem}-{name}", lengths[lengths > 0]))
    return sets


def pytest_generate_tests(metafunc: pytest.Metafunc):
    """Parametrizes tests with an argument `real_lengths` by the real length sets."""
    if "real_lengths" in metafunc.fixturenames:
        sets = real_length_sets()
        missing = pytest.param(
            None, id="none", marks=pytest.mark.skip("no real lengths in shared/data/")
        )
        params = [
            pytest.param(
                lengths,
                id=name,
                marks=() if name in QUICK_SETS else pytest.mark.exhaustive,
            )
            for name, lengths in sets
        ]
        params = params or [missing]
        metafunc.parametrize("real_lengths", params)


class Problem(NamedTuple):
    """A random plan and random lengths that it accepts."""

    plan: BucketPlan
    lengths: np.ndarray


def random_problem(seed: int) -> Problem:
    """Returns a random plan and lengths, which vary widely in size and in policy."""
    rng = np.random.default_rng(seed)
    longest = int(rng.choice([1, 7, 60, 500]))
    size = int(rng.choice([1, 5, 40, 400, 2000]))
    lengths = np.minimum(1 + rng.geometric(min(1, 3 / longest), size), longest)
    multiples = int(rng.choice([1, 2, 8])), int(rng.choice([1, 4, 16]))
    overlong = ["error", "drop", "truncate"][seed % 3]
    last = -(-int(lengths.max()) // multiples[1]) * multiples[1]
    if overlong != "error" and lengths.min() <= last - multiples[1]:
        last -= multiples[1]
    plan = plan_buckets(
        lengths,
        max_tokens=int(last * multiples[0] * rng.integers(1, 9)),
        num_buckets=int(rng.integers(1, 10)),
        cost_fn=[None, StepTime(0.1, 1e-3, 1e-5)][seed % 2],
        batch_size_multiple=multiples[0],
        seq_len_multiple=multiples[1],
        max_seq_len=last,
        boundaries=["optimal", "quantile", "geometric"][int(rng.integers(3))],
        overlong=overlong,
    )
    return Problem(plan, lengths.astype(rng.choice(["i4", "i8"])))


@pytest.fixture(
    params=[
        *range(QUICK_PROBLEMS),
        *(
            pytest.param(i, marks=pytest.mark.exhaustive)
            for i in range(QUICK_PROBLEMS, NUM_PROBLEMS)
        ),
    ]
)
def problem(request: pytest.FixtureRequest) -> Problem:
    """One of 24 random problems; 15 of them only run in the exhaustive tests."""
    return random_problem(request.param)
