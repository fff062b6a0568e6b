"""Tests of `ExecutableCache`, which reuses or recompiles executables."""

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import pickle
import re
import shutil
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.xla_metadata import set_xla_metadata

import jaxbucket as jb
from jaxbucket.compile import cache_file as files
from jaxbucket.compile import jax_settings
from jaxbucket.compile.cache_session import CacheSession
from jaxbucket.compile.canonical import canonical
from jaxbucket.compile.events import allow_compiles
from jaxbucket.compile.program import Program
from jaxbucket.compile.recipes import precompile
from jaxbucket.compile.report import ProgramReport

exhaustive = pytest.mark.exhaustive


def exhaustive_params(*values):
    """Parameters that only the exhaustive tests use."""
    return [pytest.param(value, marks=exhaustive) for value in values]


MESH = jb.data_mesh(jax.devices()[:2])
EXAMPLE = {"x": np.ones(3, np.float32)}
PLAN = jb.BucketPlan.from_shapes([(8, 4), (4, 8), (2, 16)])
SPECS = jb.sharding.batch_specs(PLAN, EXAMPLE, MESH)
STATE = {"w": np.float32(2)}
REPLICATED = jax.sharding.NamedSharding(MESH, jax.sharding.PartitionSpec())


def make_step(factor=3.0, table=None):
    def my_step(state, batch):
        x = jnp.where(batch.mask, batch.features["x"], 0)
        if table is not None:
            x = x + jnp.sum(table)
        loss = (state["w"] * x).sum() * factor
        return {"w": state["w"] + loss * 1e-3}, {"loss": loss}

    return jax.jit(my_step, donate_argnums=0)


def start(folder, step=None, specs=SPECS, state=STATE, **options):
    """Compiles; returns the steps, and the number of programs that XLA compiled."""
    cache = jb.ExecutableCache(folder, **options)
    with jb.compile.count_compiles() as compiles:
        steps = jb.compile_steps(
            step or make_step(),
            jb.sharding.replicate(state, MESH),
            specs,
            executables=cache,
        )
    return steps, compiles["my_step"]


def losses(steps):
    state, result = jb.sharding.replicate(STATE, MESH), []
    for bucket in PLAN.buckets:
        rows = [{"x": np.full(n, n, np.float32)} for n in range(1, 3)]
        batch = jb.data.collate_rows(rows, bucket)
        (batch,) = jb.sharding.prefetch_to_mesh([batch], MESH)
        before = state
        state, metrics = steps(state, batch)
        assert before["w"].is_deleted()
        result.append(float(metrics["loss"]))
    return result


@pytest.fixture(name="saved", scope="module")
def saved_fixture(tmp_path_factory):
    """The folder of a first start, and the losses of its steps."""
    folder = tmp_path_factory.mktemp("executables")
    steps, compiled = start(folder, key="a")
    assert compiled == len(PLAN)
    return folder, losses(steps)


@pytest.fixture(name="folder")
def folder_fixture(saved, tmp_path):
    """A copy of the folder of a first start."""
    for path in saved[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def executables(folder):
    return sorted(pathlib.Path(folder).glob("*.executable"))


@pytest.mark.parametrize("verify", ["all", "one", "none"])
def test_a_second_start_loads_all_programs_with_equal_results(saved, verify):
    folder, want = saved
    steps, compiled = start(folder, verify=verify, key="a")
    assert compiled == 0
    assert losses(steps) == want
    programs = steps.report.programs
    assert [p.source for p in programs] == ["loaded"] * len(PLAN)
    traced = sum(p.trace_seconds > 0 for p in programs)
    assert traced == {"all": len(PLAN), "one": 1, "none": 0}[verify]
    assert {p.file for p in programs} == {path.name for path in executables(folder)}
    assert all(p.argument_bytes > 0 and p.compile_seconds > 0 for p in programs)


JAX_CACHE = """
import sys, warnings
import jax, numpy as np
sys.path.insert(0, {folder!r})
import test_executable_cache as t
import jaxbucket as jb

warnings.simplefilter("error", RuntimeWarning)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
if sys.argv[2] == "fill":
    jb.compile_steps(t.make_step(), jb.sharding.replicate(t.STATE, t.MESH), t.SPECS)
    sys.exit()
steps, compiled = t.start(sys.argv[2])
print(compiled, t.losses(steps))
# The option is restored after the programs of the folder are compiled.
assert jax.config.jax_enable_compilation_cache
"""


@exhaustive
def test_programs_from_the_cache_of_jax_are_saved_with_their_code(tmp_path, saved):
    code = JAX_CACHE.format(folder=str(pathlib.Path(__file__).parent))
    outputs = []
    for folder in ("fill", tmp_path / "one", tmp_path / "one", tmp_path / "other"):
        command = [sys.executable, "-c", code, tmp_path / "xla", folder]
        run = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, run.stderr
        outputs.append(run.stdout)
    want = saved[1]
    assert outputs == ["", f"3 {want}\n", f"0 {want}\n", f"3 {want}\n"]


def test_an_executable_that_has_lost_its_code_is_not_saved(tmp_path):
    step, cache = make_step(), jb.ExecutableCache(tmp_path / "first")
    bucket = PLAN.buckets[0]
    program = Program(bucket, step, (jb.sharding.replicate(STATE, MESH), SPECS[bucket]))
    session = CacheSession(cache, [program])
    lowered, _ = program.lower()
    session.record(program, lowered)
    with allow_compiles():
        executable = lowered.compile()
    report = ProgramReport("my_step", "", "compiled", *(0.0,) * 3, *(0,) * 5)
    assert session.save(program, executable, report).file is not None
    again, _ = session.load(program)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "xla"))
    try:
        with pytest.warns(RuntimeWarning, match="returned it without its code"):
            assert session.save(program, again, report).file is None
    finally:
        jax.config.update("jax_compilation_cache_dir", None)


def test_executables_may_be_a_path(tmp_path):
    for num_compiled in (len(PLAN), 0):
        with jb.compile.count_compiles() as compiles:
            state = jb.sharding.replicate(STATE, MESH)
            jb.compile_steps(make_step(), state, SPECS, executables=tmp_path / "new")
        assert compiles["my_step"] == num_compiled


TABLE = np.arange(3000, dtype=np.float32)
OTHER_PROGRAMS = {
    "a constant": lambda: make_step(3.0000002),
    "a closed-over array": lambda: make_step(table=TABLE),
    "a different array": lambda: make_step(table=np.where(TABLE == 1500, 1600, TABLE)),
    "no donation": lambda: jax.jit(make_step().__wrapped__),
    "a different name": lambda: jax.jit(lambda *args: make_step().__wrapped__(*args)),
    "other options": lambda: jax.jit(
        make_step().__wrapped__,
        donate_argnums=0,
        compiler_options={"xla_cpu_enable_fast_math": True},
    ),
}


@pytest.mark.parametrize(
    ("name", "verify"),
    [
        *((name, "all") for name in OTHER_PROGRAMS),
        ("a constant", "one"),
        *(
            pytest.param(name, "one", marks=exhaustive)
            for name in OTHER_PROGRAMS
            if name != "a constant"
        ),
    ],
)
def test_a_different_program_is_compiled(folder, name, verify):
    if name == "a different array":
        start(folder, OTHER_PROGRAMS["a closed-over array"](), key="a")
    before = len(executables(folder))
    steps, _ = start(folder, OTHER_PROGRAMS[name](), verify=verify, key="a")
    assert {p.source for p in steps.report.programs} == {"compiled"}
    # It is saved alongside the others.
    assert len(executables(folder)) == before + len(PLAN)
    assert start(folder, verify=verify, key="a")[1] == 0


@exhaustive
def test_a_different_learning_rate_is_a_different_program(tmp_path):
    def loss(params, batch, keys):
        errors = params["w"] * batch.features["x"]
        return jnp.where(batch.mask, errors, 0).sum(), batch.num_tokens

    counts = []
    for rate in (1e-3, 1e-3, 2e-3):
        tx = optax.sgd(rate)
        state = jb.create_state({"w": jnp.ones(())}, tx, MESH)
        step = jb.make_train_step(loss, tx, MESH)
        with jb.compile.count_compiles() as compiles:
            jb.compile_steps(step, state, SPECS, executables=tmp_path)
        counts.append(compiles["train_step"])
    assert counts == [len(PLAN), 0, len(PLAN)]


@pytest.mark.parametrize("verify", ["none", *exhaustive_params("all", "one")])
@pytest.mark.parametrize(
    "other",
    [
        {"state": {"w": np.float16(2)}},
        {"state": {"w": np.float32(2), "v": np.float32(1)}},
        {"specs": jb.sharding.batch_specs(PLAN, {"x": np.ones(3, np.float16)}, MESH)},
        {
            "specs": jb.sharding.batch_specs(
                PLAN, EXAMPLE, jb.data_mesh(jax.devices()[2:4])
            )
        },
    ],
)
def test_programs_for_different_arguments_are_compiled(folder, other, verify):
    def my_step(state, batch):
        return state, {"loss": batch.features["x"].astype(jnp.float32).sum()}

    step = jax.jit(my_step)
    start(folder, step, key="a")
    options = {"verify": verify, "key": "a"}
    if other.keys() == {"specs"} and "x" in str(other):
        mesh = next(iter(jax.tree.leaves(other["specs"]))).sharding.mesh
        state = jb.sharding.replicate(STATE, mesh)
        cache = jb.ExecutableCache(folder, **options)
        steps = jb.compile_steps(step, state, other["specs"], executables=cache)
    else:
        steps, _ = start(folder, step, **other, **options)
    assert {p.source for p in steps.report.programs} == {"compiled"}


def test_programs_for_different_versions_and_flags_are_compiled(folder, monkeypatch):
    monkeypatch.setattr(jax, "__version__", "0.0.1")
    assert start(folder, key="a")[1] == len(PLAN)
    monkeypatch.undo()
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"] + " --xla_dump_to=")
    assert start(folder, key="a")[1] == len(PLAN)
    monkeypatch.undo()
    assert start(folder, key="b")[1] == len(PLAN)
    assert start(folder, key="a")[1] == 0


NOISY_PLAN = jb.BucketPlan.from_shapes([(4, 8), (2, 16)])
NOISY_SPECS = jb.sharding.batch_specs(NOISY_PLAN, EXAMPLE, MESH)


def noisy_step(name="my_step"):
    """Depends on jax's flags, except in its longest bucket, which is traced first."""

    def my_step(state, batch):
        loss = state["w"] * batch.num_tokens.astype(jnp.float32)
        if batch.bucket.seq_len == 8:
            noise = jax.random.normal(jax.random.key(3), (8, 8))
            loss += (noise @ noise.T).sum().astype(jnp.float32)
            loss += jnp.arange(3).dtype.itemsize
            loss += 100 * jax.sharding.get_abstract_mesh().size
        return state, {"loss": loss}

    # The guard would warn about a function of the same name.
    my_step.__name__ = name
    return jax.jit(my_step)


def noisy_loss(steps, state=STATE):
    batch = jb.data.collate_rows([EXAMPLE], NOISY_PLAN.buckets[0])
    (batch,) = jb.sharding.prefetch_to_mesh([batch], MESH)
    return float(steps(jb.sharding.replicate(state, MESH), batch)[1]["loss"])


@pytest.fixture(name="noisy", scope="module")
def noisy_fixture(tmp_path_factory):
    """The folder of a start with the default flags, and its loss."""
    folder = tmp_path_factory.mktemp("noisy")
    steps, _ = start(folder, noisy_step(), NOISY_SPECS, key="a")
    return folder, noisy_loss(steps)


@contextlib.contextmanager
def updated(name, value):
    before = jax.config.values[name]
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


TRACE_SETTINGS = {
    "prng": lambda: updated("jax_default_prng_impl", "rbg"),
    "partitionable": lambda: updated("jax_threefry_partitionable", False),
    "x64": lambda: updated("jax_enable_x64", True),
    "precision": lambda: updated("jax_default_matmul_precision", "highest"),
    "seed offset": lambda: updated("jax_random_seed_offset", 7),
    "with prng": lambda: jax.default_prng_impl("rbg"),
    "with partitionable": lambda: jax.threefry_partitionable(False),
    "with x64": lambda: jax.enable_x64(True),
    "with precision": lambda: jax.default_matmul_precision("highest"),
    "with mesh": lambda: jax.set_mesh(MESH),
    "with user context": lambda: USER_CONTEXT(("a", 1)),
    "with metadata": lambda: set_xla_metadata(note="a"),
}
USER_CONTEXT = jax.make_user_context()
OTHER_CONTEXT = jax.make_user_context()
TIMES = jax.make_user_context(1)


def is_known(name):
    """Whether a setting can be identified in a different process.

    A user context cannot, and before jax 0.10.1 any context may be one. That of the
    PRNG is a flag.
    """
    has_names = hasattr(jax_settings.jax_config, "trace_context_names")
    is_context = name.startswith("with ") and name != "with prng"
    return name != "with user context" and (has_names or not is_context)


@pytest.mark.parametrize("name", TRACE_SETTINGS)
def test_settings_of_jax_change_the_trace_settings(name):
    before = jax_settings.trace_settings()
    with TRACE_SETTINGS[name]():
        inside = jax_settings.trace_settings()
        assert inside != before
        assert (jax_settings.trace_settings() == inside) == is_known(name)
    assert jax_settings.trace_settings() == before


@pytest.mark.parametrize(
    ("name", "verify"),
    [
        ("prng", "none"),
        ("with mesh", "one"),
        *(
            pytest.param(name, verify, marks=exhaustive)
            for name in TRACE_SETTINGS
            for verify in ("one", "none")
            if (name, verify) not in (("prng", "none"), ("with mesh", "one"))
        ),
    ],
)
def test_programs_are_reused_only_with_the_same_settings_of_jax(
    noisy, tmp_path, name, verify
):
    folder, before = shutil.copytree(noisy[0], tmp_path / "saved"), noisy[1]
    with TRACE_SETTINGS[name]():
        want = noisy_loss(noisy_step("direct"))
        steps, _ = start(folder, noisy_step(), NOISY_SPECS, verify=verify, key="a")
        # All programs are traced, and those that differ are compiled.
        assert all(p.trace_seconds > 0 for p in steps.report.programs)
        assert noisy_loss(steps) == want
        # The folder has a manifest for these settings now.
        again, _ = start(folder, noisy_step(), NOISY_SPECS, verify=verify, key="a")
        assert again.report.num_compiled == 0 and noisy_loss(again) == want
        traced = sum(p.trace_seconds > 0 for p in again.report.programs)
        assert traced == ((verify == "one") if is_known(name) else 2)
    steps, _ = start(folder, noisy_step(), NOISY_SPECS, verify=verify, key="a")
    assert steps.report.num_compiled == 0 and noisy_loss(steps) == before


COMPILER_FLAGS = {
    "jax_optimization_level": "O1",
    "jax_disable_most_optimizations": True,
    "jax_use_shardy_partitioner": False,
    "jax_debug_nans": True,
}


@pytest.mark.parametrize("name", COMPILER_FLAGS)
def test_flags_of_the_compiler_change_the_compiler_flags(name):
    before = jax_settings.compiler_flags()
    with updated(name, COMPILER_FLAGS[name]):
        assert jax_settings.compiler_flags() != before
    assert jax_settings.compiler_flags() == before


@pytest.mark.parametrize(
    "name", ["jax_optimization_level", *exhaustive_params(*list(COMPILER_FLAGS)[1:])]
)
def test_programs_for_different_compiler_flags_are_compiled(noisy, name):
    with updated(name, COMPILER_FLAGS[name]):
        for num_compiled in (2, 0):
            steps, _ = start(noisy[0], noisy_step(), NOISY_SPECS, key="a")
            assert steps.report.num_compiled == num_compiled


def test_irrelevant_flags_do_not_prevent_loading(noisy, tmp_path):
    with contextlib.ExitStack() as stack:
        for name, value in (
            ("jax_log_compiles", True),
            ("jax_logging_level", "ERROR"),
            ("jax_traceback_filtering", "off"),
            ("jax_compilation_cache_dir", str(tmp_path)),
            ("jax_enable_compilation_cache", False),
            ("jax_persistent_cache_min_compile_time_secs", 3.0),
            ("jax_explain_cache_misses", True),
            ("jax_transfer_guard", "allow"),
            ("jax_captured_constants_warn_bytes", 10**6),
        ):
            stack.enter_context(updated(name, value))
        for verify in ("all", "one", "none"):
            steps, _ = start(
                noisy[0], noisy_step(), NOISY_SPECS, verify=verify, key="a"
            )
            assert steps.report.num_compiled == 0
            traced = sum(p.trace_seconds > 0 for p in steps.report.programs)
            assert traced == {"all": 2, "one": 1, "none": 0}[verify]


FLAGS = """
import sys
sys.path.insert(0, {folder!r})
import test_executable_cache as t

want = t.noisy_loss(t.noisy_step("direct"))
steps, compiled = t.start(
    sys.argv[1], t.noisy_step(), t.NOISY_SPECS, verify="none", key="a"
)
assert t.noisy_loss(steps) == want
print(compiled, want)
"""


@exhaustive
def test_settings_from_environment_variables_select_the_executables(tmp_path):
    code = FLAGS.format(folder=str(pathlib.Path(__file__).parent))
    settings = {
        "JAX_DEFAULT_PRNG_IMPL": "rbg",
        "JAX_ENABLE_X64": "1",
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    }
    outputs = []
    for seed, environment in enumerate(
        ({}, settings, settings, {"JAX_LOGGING_LEVEL": "ERROR"})
    ):
        run = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)],
            env=os.environ | environment | {"PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stderr
        outputs.append(run.stdout.split())
    assert [int(compiled) for compiled, _ in outputs[1:]] == [2, 0, 0]
    losses = [loss for _, loss in outputs]
    assert losses[1] == losses[2] != losses[0] == losses[3]


def test_a_function_is_traced_again_for_a_different_prng(tmp_path):
    """jax alone does not do so, and other processes would load the wrong program."""
    step = noisy_step()
    start(tmp_path, step, NOISY_SPECS, key="a")
    with jax.default_prng_impl("rbg"):
        steps, _ = start(tmp_path, step, NOISY_SPECS, key="a")
        assert noisy_loss(steps) == noisy_loss(noisy_step("direct"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("verify", ["none", *exhaustive_params("one")])
def test_pmap_steps_are_traced_again_for_a_different_prng(tmp_path, verify):
    """Even if the same step is compiled for both."""

    def by_noise(params, batch, keys):
        # The keys of rows always use threefry.
        noise = jax.random.uniform(jax.random.key(3))
        return noise * params["w"], batch.num_tokens

    tx = optax.sgd(0.0)
    state = jb.create_state({"w": jnp.float32(1)}, tx)
    cache = jb.ExecutableCache(tmp_path, verify=verify, key="a")

    def new_step():
        return jb.make_train_step(by_noise, tx, MESH, mode="pmap")

    def compiled_loss(step, executables=cache):
        specs = {NOISY_PLAN.buckets[0]: NOISY_SPECS[NOISY_PLAN.buckets[0]]}
        steps = jb.compile_steps(
            step, jb.sharding.replicate(state, MESH), specs, executables=executables
        )
        return noisy_loss(steps, state), steps.report.num_compiled

    step = new_step()
    first, _ = compiled_loss(step)
    with jax.default_prng_impl("rbg"):
        want, _ = compiled_loss(new_step(), None)
        assert compiled_loss(step) == (want, 1)
        # As in a different process.
        assert compiled_loss(new_step()) == (want, 0)
    assert compiled_loss(step) == (first, 0) and first != want


def test_nested_functions_are_traced_again_for_a_different_prng(tmp_path):
    noise = jax.jit(lambda: jax.random.uniform(jax.random.key(3)))

    def new_step():
        def my_step(state, batch):
            return state, {"loss": noise() * state["w"]}

        return jax.jit(my_step)

    want = {}
    for prng in ("threefry2x32", "rbg"):
        with jax.default_prng_impl(prng):
            options = {"verify": "none", "key": "a"}
            steps, _ = start(tmp_path, new_step(), NOISY_SPECS, **options)
            want[prng] = float(jax.random.uniform(jax.random.key(3)) * 2)
            assert noisy_loss(steps) == pytest.approx(want[prng])
    assert want["rbg"] != want["threefry2x32"]


CALLED_BEFORE = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jaxbucket import Batch, ExecutableCache, compile_steps

def step(state, batch):
    return state, noise(batch.features["seed"][0]).sum()

noise = jax.jit(lambda seed: jax.random.normal(jax.random.key(seed), (4,)))
ids = np.ones((2, 4), np.int32)
batch = Batch({"seed": np.zeros(2, np.int32)}, {"x": ids}, {"x": ids})
device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
state, batch = jax.device_put((jnp.float32(1), batch), device)
spec = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), batch
)
noise(batch.features["seed"][0])
jax.config.update("jax_default_prng_impl", "rbg")
cache = ExecutableCache(sys.argv[1], verify="none", key="a")
steps = compile_steps(step, state, {batch.bucket: spec}, executables=cache)
want = jax.random.normal(jax.random.key(0), (4,)).sum()
assert np.isclose(steps(state, batch)[1], want), (steps(state, batch)[1], want)
"""


@exhaustive
def test_functions_called_before_the_first_compilation_are_traced_again(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", CALLED_BEFORE, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


def test_user_contexts_are_distinguished(tmp_path):
    def my_step(state, batch):
        unit = batch.num_tokens.astype(jnp.float32)
        entered = 10 * (USER_CONTEXT.value or 0) + 100 * (OTHER_CONTEXT.value or 0)
        return state, {"loss": unit * TIMES.value + entered}

    def traced_and_loss(entered):
        with entered:
            options = {"verify": "none", "key": "a"}
            steps, _ = start(tmp_path, jax.jit(my_step), NOISY_SPECS, **options)
            return {p.trace_seconds > 0 for p in steps.report.programs}, noisy_loss(
                steps
            )

    # A context with its default value does not require tracing.
    assert traced_and_loss(contextlib.nullcontext()) == ({True}, 3)
    assert traced_and_loss(contextlib.nullcontext()) == ({False}, 3)
    assert traced_and_loss(TIMES(2)) == ({True}, 6)
    assert traced_and_loss(USER_CONTEXT(2)) == ({True}, 23)
    assert traced_and_loss(OTHER_CONTEXT(2)) == ({True}, 203)


def test_all_programs_are_traced_if_jax_does_not_name_its_settings(
    tmp_path, monkeypatch
):
    def sources(verify):
        steps, _ = start(tmp_path, noisy_step(), NOISY_SPECS, verify=verify, key="a")
        return [(p.source, p.trace_seconds > 0) for p in steps.report.programs]

    monkeypatch.delattr(jax_settings.jax_config, "trace_context_names", raising=False)
    assert sources("none") == [("compiled", True)] * 2
    assert sources("none") == [("loaded", False)] * 2
    with updated("jax_default_matmul_precision", "highest"):
        assert sources("none") == [("compiled", True)] * 2
    monkeypatch.delattr(jax_settings.jax_config, "trace_context")
    assert sources("none") == [("loaded", True)] * 2
    assert sources("none") == [("loaded", True)] * 2


def test_weakly_typed_states_are_not_reused(tmp_path):
    def my_step(state, batch):
        return state, {"loss": state["w"] * batch.features["x"].sum()}

    specs = jb.sharding.batch_specs(NOISY_PLAN, {"x": np.ones(3, np.float16)}, MESH)
    batch = jb.data.collate_rows([{"x": np.ones(3, np.float16)}], NOISY_PLAN.buckets[0])
    (batch,) = jb.sharding.prefetch_to_mesh([batch], MESH)
    cache = jb.ExecutableCache(tmp_path, verify="none", key="a")
    with jax.numpy_dtype_promotion("standard"):
        for weight in (jnp.float32(2), jnp.asarray(2.0)):
            state = jax.tree.map(lambda x: jax.device_put(x, REPLICATED), {"w": weight})
            want = jax.eval_shape(my_step, state, batch)[1]["loss"].dtype
            steps = jb.compile_steps(jax.jit(my_step), state, specs, executables=cache)
            assert steps(state, batch)[1]["loss"].dtype == want


def test_without_verification_only_the_key_counts(folder):
    other = make_step(4.0)
    steps, compiled = start(folder, other, verify="none", key="a")
    assert compiled == 0
    # As requested, because the key says that nothing has changed.
    assert losses(steps) == losses(start(folder, key="a")[0])
    assert start(folder, other, verify="none", key="b")[1] == len(PLAN)


def test_only_a_new_bucket_is_compiled(folder):
    plan = jb.BucketPlan.from_shapes([(8, 4), (4, 8), (2, 16), (2, 20)])
    specs = jb.sharding.batch_specs(plan, EXAMPLE, MESH)
    steps, compiled = start(folder, specs=specs, key="a")
    assert compiled == 1
    sources = {p.label: p.source for p in steps.report.programs}
    assert sources.pop("[2, 20]") == "compiled"
    assert list(sources.values()) == ["loaded"] * 3


def damage(path, rng):
    """Truncates a file, flips some of its bits, or replaces its content."""
    content = bytearray(path.read_bytes())
    kind = rng.integers(4)
    if kind == 0:
        content = content[: rng.integers(len(content))]
    elif kind == 1:
        for place in rng.integers(len(content), size=rng.integers(1, 4)):
            content[place] ^= 1 << rng.integers(8)
    elif kind == 2:
        # In the header or the checksum.
        content[rng.integers(min(900, len(content)))] ^= 1 << rng.integers(8)
    else:
        content = bytearray(rng.bytes(int(rng.integers(200))))
    changed = bytes(content) != path.read_bytes()
    path.write_bytes(content)
    return changed


@pytest.mark.parametrize(
    ("seed", "times"),
    [
        *((seed, 3) for seed in range(3)),
        *(pytest.param(seed, 8, marks=exhaustive) for seed in range(3, 6)),
    ],
)
def test_damaged_files_are_named_and_not_loaded(folder, saved, seed, times):
    rng = np.random.default_rng(seed)
    verify = ["all", "one", "none"][seed % 3]
    for _ in range(times):
        paths = sorted(folder.iterdir())
        chosen = [path for path in paths if rng.random() < 0.5] or paths[:1]
        damaged = {path.name for path in chosen if damage(path, rng)}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            steps, compiled = start(folder, verify=verify, key="a")
        named = " ".join(str(w.message) for w in caught)
        manifests = {name for name in damaged if name.endswith(".programs")}
        if verify == "all" or not manifests:
            assert all(name in named for name in damaged - manifests)
            assert compiled == len(damaged - manifests)
        if verify != "all":
            assert all(name in named for name in manifests)
        assert losses(steps) == saved[1]
    assert start(folder, verify=verify, key="a")[1] == 0


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is truncated"),
        (b"jaxbuck", "is truncated"),
        (b"\x80\x04\x95", "is not from jaxbucket"),
        (b"jaxbucket 1 " + b"0" * 64, "is not from jaxbucket"),
        (b"jaxbucket 2 " + b"0" * 64 + b"{}\n", "is truncated or damaged"),
    ],
)
def test_the_warning_names_the_problem_of_a_file(folder, content, problem):
    path = executables(folder)[0]
    path.write_bytes(content)
    with pytest.warns(RuntimeWarning, match=re.escape(f"{path} {problem}")):
        assert start(folder, key="a")[1] == 1


class Raises:
    """Raises an error of the given type when it is unpickled."""

    def __init__(self, kind):
        self.kind = kind

    def __reduce__(self):
        return _raise, (self.kind,)


def _raise(kind):
    raise kind("not today")


def fields_of(body):
    """Returns the fields at the start of a file, and the executable after them."""
    file = io.BytesIO(body)
    return pickle.load(file), file.read()


def bodies(body, other):
    fields, code = fields_of(body)
    yield from (b"", body[: len(body) // 2], body[:-1], b"\xff" * 100)
    yield from map(pickle.dumps, (None, 5, [], {}, fields, fields | {"future": 1}))
    yield pickle.dumps({name: fields[name] for name in list(fields)[1:]}) + code
    yield from (pickle.dumps(fields) + pickle.dumps(x) for x in (None, 5, "name"))
    for kind in (ValueError, AttributeError, RecursionError, MemoryError, SystemExit):
        yield pickle.dumps(Raises(kind))
    # The body of a different program.
    yield other


def test_files_with_invalid_content_are_reported(folder):
    state = jb.sharding.replicate(STATE, MESH)
    programs = [Program(b, make_step(), (state, SPECS[b])) for b in PLAN.buckets]
    session = CacheSession(jb.ExecutableCache(folder, key="a"), programs)
    for program in programs[:2]:
        session.record(program, program.lower()[0])
    paths = [folder / session.load(program)[1].file for program in programs[:2]]
    for body in bodies(*map(files.read, paths)):
        files.write(paths[0], body)
        with pytest.warns(RuntimeWarning, match=re.escape(f"{paths[0]} ")):
            assert session.load(programs[0]) is None


@pytest.mark.parametrize("verify", ["one", "none"])
def test_manifests_with_invalid_content_are_reported(folder, verify):
    (path,) = folder.glob("*.programs")
    hashes = json.loads(files.read(path))
    first = next(iter(hashes))
    for other in (None, [], {}, hashes | {first: "0" * 64}, {first: hashes[first]}):
        files.write(path, json.dumps(other).encode())
        with pytest.warns(RuntimeWarning, match=re.escape(f"{path} does not match")):
            steps, compiled = start(folder, verify=verify, key="a")
        # All programs are traced and loaded, and the manifest is written again.
        assert compiled == 0
        assert all(p.trace_seconds > 0 for p in steps.report.programs)
        assert json.loads(files.read(path)) == hashes


@pytest.mark.parametrize("kind", ["folder", "loop", "pipe", "device", "unreadable"])
def test_a_path_that_is_not_a_readable_file_is_named(folder, saved, kind):
    paths = [*executables(folder)[:1], *folder.glob("*.programs")]
    for path in paths:
        if kind == "unreadable":
            path.chmod(0)
            continue
        path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind == "loop":
            path.symlink_to(path.name)
        elif kind == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to("/dev/zero")
    if kind == "unreadable" and os.access(paths[0], os.R_OK):
        pytest.skip("this user may read every file")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps, compiled = start(folder, verify="one", key="a")
    named = " ".join(str(w.message) for w in caught)
    assert all(f"{path} " in named for path in paths), named
    assert compiled == len(PLAN) or (compiled == 1 and losses(steps) == saved[1])
    assert losses(steps) == saved[1]


def test_folders_with_the_names_of_executables_are_not_removed(folder):
    odd = [folder / "x.executable", folder / "y.executable.ab.partial"]
    for path in odd:
        path.mkdir()
        os.utime(path, (1, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        size = sum(path.stat().st_size for path in folder.glob("*.*") if path.is_file())
        start(folder, make_step(5.0), key="a", max_gb=1.1 * size / 1e9)
    assert all(path.exists() for path in odd)
    assert len(executables(folder)) < 2 * len(PLAN) + 1


def test_a_renamed_file_is_not_loaded(folder):
    first, second, *_ = executables(folder)
    first.write_bytes(second.read_bytes())
    with pytest.warns(
        RuntimeWarning, match="does not match its name: it contains a different"
    ):
        steps, compiled = start(folder, key="a")
    assert compiled == 1


@pytest.mark.parametrize("verify", ["one", "none"])
@pytest.mark.parametrize(
    "first", [PLAN.buckets[1], *exhaustive_params(*PLAN.buckets[::2])]
)
def test_executables_do_not_depend_on_the_order_of_compilation(folder, first, verify):
    cache = jb.ExecutableCache(folder, verify=verify, key="a")
    state = jb.sharding.replicate(STATE, MESH)
    steps = jb.compile_steps(
        make_step(), state, SPECS, executables=cache, opening=first
    )
    steps.wait()
    programs = steps.report.programs
    assert {p.source for p in programs} == {"loaded"}
    assert sum(p.trace_seconds > 0 for p in programs) == (verify == "one")


@pytest.mark.parametrize(
    ("mode", "changed"),
    [
        ("jit", "rate"),
        pytest.param("jit", "loss", marks=exhaustive),
        pytest.param("pmap", "rate", marks=exhaustive),
        pytest.param("pmap", "loss", marks=exhaustive),
    ],
)
def test_verify_one_checks_one_program_per_function(tmp_path, mode, changed):
    def run(rate, factor, verify):
        def loss(params, batch, rng):
            x = jnp.where(batch.mask, batch.features["x"], 0)
            return factor * (params["w"] * x).sum(), batch.num_tokens

        tx = optax.sgd(rate)
        step = jb.make_train_step(loss, tx, MESH, accumulate=True, mode=mode)
        state = jb.create_state({"w": np.float32(2)}, tx, MESH)
        cache = jb.ExecutableCache(tmp_path, verify=verify)
        steps = jb.compile_steps(step, state, SPECS, executables=cache)
        rows = [{"x": np.ones(3, np.float32)}] * 2
        batch = jb.data.collate_rows(rows, PLAN.buckets[0])
        state, metrics = steps(
            state, tuple(jb.sharding.prefetch_to_mesh([batch] * 2, MESH))
        )
        return steps, [float(state.params["w"]), float(metrics["loss"])]

    _, before = run(0.1, 1.0, "all")
    again, same = run(0.1, 1.0, "one")
    assert same == before and again.report.num_compiled == 0
    other = (0.5, 1.0) if changed == "rate" else (0.1, 3.0)
    _, result = run(*other, "one")
    _, want = run(*other, "all")
    assert result == want != before


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Loss:
    value: jax.Array
    unit: str = dataclasses.field(metadata={"static": True})


class Plain:
    """Has no value that could be compared in a different process."""


@pytest.mark.parametrize("verify", ["all", "one"])
def test_a_different_constant_in_the_outputs_is_a_different_program(tmp_path, verify):
    def run(unit):
        def my_step(state, batch):
            return state, Loss(batch.features["x"].sum(), unit)

        steps, _ = start(tmp_path, jax.jit(my_step), verify=verify)
        batch = jb.data.collate_rows([{"x": np.ones(3, np.float32)}], PLAN.buckets[0])
        (batch,) = jb.sharding.prefetch_to_mesh([batch], MESH)
        return steps(jb.sharding.replicate(STATE, MESH), batch)[1].unit

    assert run("nats") == "nats"
    assert run("bits") == "bits"
    assert run("nats") == "nats"
    if verify == "all":
        assert isinstance(run(Plain()), Plain)
        other = Plain()
        with pytest.warns(
            RuntimeWarning, match="has different constants in its outputs"
        ):
            assert run(other) is other


def test_verify_none_ignores_the_manifest_of_an_interrupted_run(tmp_path):
    for factor in (1.0, 2.0, 3.0):
        start(tmp_path, make_step(factor), key="a")
    *_, last = sorted(tmp_path.glob("*.programs"), key=lambda x: x.stat().st_mtime_ns)
    # A run that reads all manifests, and does not finish.
    cache = jb.ExecutableCache(tmp_path, verify="one", key="a")
    state = jb.sharding.replicate(STATE, MESH)
    bucket = PLAN.buckets[0]
    programs = [Program(b, make_step(9.0), (state, SPECS[b])) for b in PLAN.buckets]
    CacheSession(cache, programs).record(programs[0], programs[0].lower()[0])
    steps, _ = start(tmp_path, make_step(1.0), verify="none", key="a")
    assert losses(steps) == losses(start(tmp_path, make_step(3.0))[0])
    assert bucket in steps and last.exists()


def test_removed_files_are_reported_as_not_saved(tmp_path):
    def recipe(plan):
        def other_step(state, batch):
            return state, (state["w"] * batch.features["x"]).max()

        state = jb.sharding.replicate(STATE, MESH)
        return {
            "train": (make_step(), state, SPECS),
            "other": (jax.jit(other_step), state, SPECS),
        }

    done = precompile(recipe, PLAN, executables=jb.ExecutableCache(tmp_path / "all"))
    assert done.not_saved() == []
    size = sum(path.stat().st_size for path in (tmp_path / "all").iterdir())
    cache = jb.ExecutableCache(tmp_path / "some", max_gb=0.7 * size / 1e9)
    done = precompile(recipe, PLAN, executables=cache)
    assert done.not_saved() and all(x.startswith("my_step") for x in done.not_saved())


SEEDED = """
import sys
import jax, numpy as np
sys.path.insert(0, "tests/compile")
import test_executable_cache as t

import dataclasses, functools

@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["names"]
)
@dataclasses.dataclass(frozen=True)
class State:
    w: object
    names: frozenset[str]

def my_step(state, batch):
    return dataclasses.replace(state, w=2 * state.w), batch.num_tokens

state = State(np.float32(2), frozenset({"embed", "head", "bias", "norm"}))
print(t.start(sys.argv[1], jax.jit(my_step), state=state)[1])
"""


@exhaustive
def test_executables_do_not_depend_on_the_hash_seed(tmp_path):
    outputs = []
    for seed in "123":
        run = subprocess.run(
            [sys.executable, "-W", "error", "-c", SEEDED, str(tmp_path)],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": "tests/compile"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stderr
        outputs.append(run.stdout.strip())
    assert outputs == ["3", "0", "0"]


def test_a_relative_folder_survives_a_change_of_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = jb.sharding.replicate(STATE, MESH)
    steps = jb.compile_steps(
        make_step(), state, SPECS, executables="saved", opening=PLAN.buckets[0]
    )
    monkeypatch.chdir("/")
    steps.wait()
    assert len(executables(tmp_path / "saved")) == len(PLAN)


def test_an_unwritable_folder_causes_one_warning(tmp_path, saved):
    place = tmp_path / "file"
    place.write_text("")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps, compiled = start(place / "folder", key="a")
    assert compiled == len(PLAN) and losses(steps) == saved[1]
    messages = [str(w.message) for w in caught if "not saved" in str(w.message)]
    assert len(messages) == 1 and "choose a different folder" in messages[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_full_disk_is_not_an_error(tmp_path, saved):
    mount = ["mount", "-t", "tmpfs", "-o", "size=48k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("there is no tmpfs to mount here")
    try:
        with pytest.warns(RuntimeWarning, match="No space left on device"):
            steps, compiled = start(tmp_path, key="a")
        assert compiled == len(PLAN) and losses(steps) == saved[1]
        left = [path.name for path in tmp_path.iterdir()]
        assert not [name for name in left if name.endswith(".partial")]
        with pytest.warns(RuntimeWarning, match="No space left on device"):
            steps, _ = start(tmp_path, key="a")
        assert losses(steps) == saved[1]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def misses(caplog):
    """Returns the messages about programs that were not found, and forgets them."""
    messages = [x for x in caplog.messages if "none of this job's programs" in x]
    caplog.clear()
    return messages


@pytest.mark.parametrize(
    ("name", "options", "old", "new"),
    [
        ("version", {}, "", "jax 0.0.1"),
        ("flags", {}, "", "XLA_FLAGS --xla_dump_to="),
        ("key", {"key": "b"}, "key a", "key b"),
        ("no key", {"key": ""}, "key a", "key unset"),
        (
            "shape",
            {"state": {"w": np.ones(1, "f4")}},
            "[0]['w'] float32[]",
            "[0]['w'] ",
        ),
        ("code", {"step": make_step(7.0)}, "", None),
    ],
)
def test_a_job_without_any_of_its_programs_says_why_once(
    folder, monkeypatch, caplog, name, options, old, new
):
    if name == "version":
        monkeypatch.setattr(jax, "__version__", "0.0.1")
    if name == "flags":
        monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=")
    start(folder, **{"key": "a", **options})
    (message,) = misses(caplog)
    why = "their code or settings differ" if new is None else f"this job has {new}"
    had = f"3 programs for 1 process, jax {jax.version.__version__}"
    assert message.startswith(f"{folder} has none of this job's programs, only {had}")
    assert old in message.partition(";")[0] and f"; {why}" in message
    # Now they are there.
    start(folder, **{"key": "a", **options})
    assert not misses(caplog)


def test_nothing_is_said_if_programs_are_found_or_were_never_saved(folder, caplog):
    start(folder, key="a")
    others = jb.BucketPlan.from_shapes([(8, 4), (4, 32)])
    specs = jb.sharding.batch_specs(others, EXAMPLE, MESH)
    # One of two buckets is found.
    assert start(folder, specs=specs, key="a")[1] == 1
    # Another function, an empty folder, and files that were removed.
    step = jax.jit(lambda state, batch: (state, {"loss": state["w"]}))
    start(folder, step, key="b")
    start(folder / "empty", key="c")
    for path in executables(folder):
        path.unlink()
    start(folder, key="a")
    assert not misses(caplog)


def test_the_least_recently_used_files_are_removed_first(tmp_path):
    for number, factor in enumerate((1.0, 2.0, 3.0)):
        start(tmp_path, make_step(factor))
        for path in tmp_path.iterdir():
            if path.stat().st_mtime > 1e9:
                os.utime(path, (number, number))
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    os.utime(other, (0, 0))
    # The limit leaves no room, so a fourth run evicts the least recently used files.
    assert start(tmp_path, make_step(1.0), max_gb=size / 1e9)[1] == 0
    assert start(tmp_path, make_step(4.0), max_gb=size * 1.01 / 1e9)[1] == len(PLAN)
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) <= size * 1.01
    assert other.exists()
    assert start(tmp_path, make_step(1.0))[1] == 0
    assert start(tmp_path, make_step(2.0))[1] > 0


def test_a_limit_below_the_size_of_one_run_causes_a_warning(tmp_path):
    with pytest.warns(RuntimeWarning, match="`max_gb=1e-06` is less than the"):
        _, compiled = start(tmp_path, max_gb=1e-6)
    # Files in use are not removed.
    assert compiled == len(PLAN) == len(executables(tmp_path))


def test_old_partial_files_are_removed(folder):
    old, new = folder / "x.executable.ab.partial", folder / "y.executable.cd.partial"
    for path in (old, new):
        path.write_text("")
    os.utime(old, (1, 1))
    start(folder, make_step(5.0), key="a")
    assert not old.exists() and new.exists()


def test_programs_that_call_python_are_compiled_in_every_run(tmp_path):
    def my_step(state, batch):
        jax.debug.callback(lambda x: None, state["w"])
        return state, {"loss": state["w"]}

    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            steps, _ = start(tmp_path, jax.jit(my_step))
        assert {p.source for p in steps.report.programs} == {"compiled"}
        assert any(
            "because it calls Python functions" in str(w.message) for w in caught
        )
    assert not list(tmp_path.iterdir())


def test_files_are_written_atomically(tmp_path):
    path, bodies = tmp_path / "x.executable", [bytes([n]) * 10**5 for n in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            writes = [pool.submit(files.write, path, body) for body in bodies]
            while not all(write.done() for write in writes):
                assert files.read(path) in (None, *bodies)
            assert {write.result() for write in writes} == {None}
    assert [x.name for x in tmp_path.iterdir()] == [path.name]


def test_canonical_json_is_the_same_in_every_process():
    def to_json(value):
        return canonical(value, fallback=lambda x: type(x).__name__)

    values = [frozenset("embed"), {"a": {1, 2}, "b": (3.0, None)}, Plain()]
    assert to_json(values) == [
        *("list", ["frozenset", "'b'", "'d'", "'e'", "'m'"]),
        ["dict", ["'a'", ["set", "1", "2"]], ["'b'", ["tuple", "3.0", "None"]]],
        "Plain",
    ]
    assert to_json({"b": 1, "a": 2}) == to_json({"a": 2, "b": 1})
    assert to_json({"b": 1, "a": 2}) != to_json({"a": 1, "b": 2})


SEVERAL = """
import sys
import jax, numpy as np
sys.path.insert(0, {folder!r})
import test_executable_cache as t

# As in the tests, because jax 0.9 does not tell which flags only change tracing.
jax.config.update("jax_numpy_dtype_promotion", "strict")
steps, compiled = t.start({cache!r}, key="a")
print(compiled, t.losses(steps))
"""


@exhaustive
def test_several_processes_may_write_to_a_folder_simultaneously(tmp_path, saved):
    code = SEVERAL.format(
        folder=str(pathlib.Path(__file__).parent), cache=str(tmp_path / "cache")
    )
    # This process, which reads the files below, does not have these settings.
    settings = ("JAX_COMPILATION_CACHE", "JAX_DISABLE_MOST_OPTIMIZATIONS")
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(settings)
    }
    runs = [
        subprocess.Popen(
            [sys.executable, "-W", "error::RuntimeWarning", "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for _ in range(4)
    ]
    for run in runs:
        output, errors = run.communicate(timeout=200)
        assert run.returncode == 0, errors
        assert output.split(maxsplit=1)[1].strip() == str(saved[1])
    assert len(list((tmp_path / "cache").iterdir())) == len(PLAN) + 1
    assert start(tmp_path / "cache", key="a")[1] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"verify": "some"}, "`verify='some'`: choose 'all', 'one' or 'none'."),
        ({"verify": "none"}, "`verify='none'` does not check whether your code has"),
        ({"max_gb": "8"}, "`max_gb='8'` must be a positive number."),
        ({"folder": 3}, "`folder=3` must be the path of a folder on a file"),
        ({"folder": "gs://bucket/x"}, "`folder='gs://bucket/x'` must be the path"),
        ({"max_gb": 0}, "`max_gb=0` must be a positive number."),
        ({"max_gb": float("nan")}, "`max_gb=nan` must be a positive number."),
    ],
)
def test_invalid_cache_options_are_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        jb.ExecutableCache(**{"folder": "folder", **options})


TOGETHER = """
import os, pathlib, time
import jax, jax.numpy as jnp, numpy as np
import jaxbucket as jb

# Without `Processes`, which would end all of them at the first error.
address, count, index = (
    os.environ["JAX_" + name]
    for name in ("COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID")
)
jax.distributed.initialize(address, int(count), int(index))
folder = pathlib.Path({folder!r})
plan = jb.BucketPlan.from_shapes([(8, 4), (4, 8)])
example = {{"x": np.ones(3, np.float32)}}

def start(folder, fails=False, shape=(), opening={opening}, **options):
    def my_step(state, batch):
        if fails and batch.bucket.seq_len == 4:
            raise ArithmeticError("only here")
        return jnp.where(batch.mask, state.sum() * batch.features["x"], 0).sum()

    mesh = jb.data_mesh()
    specs = jb.sharding.batch_specs(plan, example, mesh)
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    step = jax.jit(my_step, out_shardings=replicated)
    cache = jb.ExecutableCache(folder, key="a", **options)
    state = jb.sharding.replicate(jax.ShapeDtypeStruct(shape, np.float32), mesh)
    steps = jb.compile_steps(step, state, specs, executables=cache, opening=opening)
    steps.wait()
    state = jb.sharding.replicate(np.ones(shape, np.float32), mesh)
    losses, rows = [], jb.sharding.local_rows(mesh)
    for bucket in plan.buckets:
        batch = jb.data.collate_rows([example] * 3, bucket)
        batch = jax.tree.map(lambda x: x[rows.rows(len(x))], batch)
        (batch,) = jb.sharding.prefetch_to_mesh([batch], mesh)
        losses.append(float(steps(state, batch)))
    record(steps.report.num_compiled, *losses)

start(folder / "all")
start(folder / "all", verify="none")
start(folder / "all", verify="one", opening=plan.buckets[0])
if index == "1":
    next((folder / "all").glob("*.executable")).unlink()
    # On local devices only, so that no other process takes part.
    jb.compile_steps(
        lambda state, batch: state,
        jb.sharding.replicate(np.float32(2), one := jb.data_mesh(jax.local_devices())),
        jb.sharding.batch_specs(plan, example, one),
        executables=folder / "local",
    )
start(folder / "all", verify="one")
for options in ({{"shape": (3 + int(index),)}}, {{"fails": index == "1"}}):
    try:
        start(folder / "none", **options)
    except (ArithmeticError, RuntimeError) as error:
        record(type(error).__name__, error)
# The main thread ends while a background thread is still compiling.
jb.compile_steps(
    lambda state, batch: (time.sleep(1), state)[1],
    jb.sharding.replicate(np.float32(2), mesh := jb.data_mesh()),
    jb.sharding.batch_specs(plan, example, mesh),
    executables=folder / "all",
    opening=plan.buckets[0],
)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("opening", ["()", *exhaustive_params("plan.buckets[0]")])
def test_processes_agree_on_what_they_compile(launch, tmp_path, opening):
    code = TOGETHER.format(folder=str(tmp_path), opening=opening)
    done = launch(code, devices=2)
    assert done.status == 0, done.output
    (*first, other_programs, stopped), (*second, _, failed) = (
        done.recorded(0),
        done.recorded(1),
    )
    # Both processes compile a program, or neither does.
    assert first == second == [f"{count} 9.0 9.0" for count in (2, 0, 0, 1)]
    assert "Process 1 compiles different programs from process 0" in other_programs
    assert failed == "ArithmeticError only here"
    assert stopped == (
        "AgreementError Process 1 has stopped compiling: ArithmeticError: only here"
    )
