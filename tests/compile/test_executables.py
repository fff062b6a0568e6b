"""Tests of the files of `compile_steps(..., executables=)`."""

import dataclasses
import functools
import os
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxbucket as jb

exhaustive = pytest.mark.exhaustive

MESH = jb.data_mesh(jax.devices()[:2])
PLAN = jb.BucketPlan.from_shapes([(8, 4), (4, 8)])
SPECS = jb.sharding.batch_specs(PLAN, {"x": np.ones(3, np.float32)}, MESH)
STATE = {"v": np.float32(3), "w": np.float32(2)}


def make_step(factor=3.0, table=None, used="w", **options):
    def my_step(state, batch):
        x = jnp.where(batch.mask, batch.features["x"], 0)
        if table is not None:
            x = x + jnp.sum(table)
        loss = (state[used] * x).sum() * factor
        return {**state, used: state[used] + loss * 1e-3}, {"loss": loss}

    return jax.jit(my_step, **{"donate_argnums": 0, **options})


def start(folder, step=None, state=STATE, **options):
    """Compiles; returns the steps, and the number of programs that XLA compiled."""
    state = jb.sharding.replicate(state, MESH)
    with jb.compile.count_compiles() as compiles:
        steps = jb.compile_steps(
            step or make_step(), state, SPECS, executables=folder, **options
        )
    names = {program.name for program in steps.report.programs}
    return steps, sum(compiles[name] for name in names)


def losses(steps, state=STATE):
    state, result = jb.sharding.replicate(state, MESH), []
    for bucket in PLAN.buckets:
        rows = [{"x": np.full(n, n, np.float32)} for n in range(1, 3)]
        batch = jb.data.collate_rows(rows, bucket)
        (batch,) = jb.sharding.prefetch_to_mesh([batch], MESH)
        state, metrics = steps(state, batch)
        result.append(float(metrics["loss"]))
    return result


@pytest.fixture(name="saved", scope="module")
def saved_fixture(tmp_path_factory):
    """The folder of a first start, and the losses of its steps."""
    folder = tmp_path_factory.mktemp("executables")
    steps, compiled = start(folder)
    assert compiled == len(PLAN)
    return folder, losses(steps)


@pytest.fixture(name="folder")
def folder_fixture(saved, tmp_path):
    """A copy of the folder of a first start."""
    for path in saved[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def test_a_second_start_loads_all_programs_with_equal_results(saved):
    folder, want = saved
    steps, compiled = start(folder)
    assert compiled == 0 and losses(steps) == want
    programs = steps.report.programs
    assert [p.source for p in programs] == ["loaded"] * len(PLAN)
    assert {p.file for p in programs} == {path.name for path in folder.iterdir()}
    assert all(p.argument_bytes > 0 and p.compile_seconds > 0 for p in programs)
    # The state is donated, as in the first start.
    state = jb.sharding.replicate(STATE, MESH)
    steps(state, next(iter(jb.sharding.prefetch_to_mesh([full_batch()], MESH))))
    assert state["w"].is_deleted()


def full_batch():
    return jb.data.collate_rows([{"x": np.ones(3, np.float32)}], PLAN.buckets[0])


def mean_loss(params, batch, keys):
    errors = params["w"] * batch.features["x"]
    return jnp.where(batch.mask, errors, 0).sum(), batch.num_tokens


@exhaustive
@pytest.mark.parametrize("mode", ["jit", "shard_map", "pmap"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_train_steps_are_loaded_in_all_modes(tmp_path, mode, accumulate):
    results = []
    for _ in range(2):
        tx = optax.sgd(0.1, momentum=0.9)
        state = jb.create_state({"w": jnp.ones(()), "b": jnp.ones(3)}, tx, MESH)
        step = jb.make_train_step(mean_loss, tx, MESH, mode=mode, accumulate=accumulate)
        steps = jb.compile_steps(step, state, SPECS, executables=tmp_path)
        batch = next(iter(jb.sharding.prefetch_to_mesh([full_batch()], MESH)))
        state, metrics = steps(state, (batch, batch) if accumulate else batch)
        results.append((float(metrics["loss"]), float(state.params["w"])))
    assert results[0] == results[1]
    assert {p.source for p in steps.report.programs} == {"loaded"}


TABLE = np.arange(3000, dtype=np.float32)
OTHER_PROGRAMS = {
    "a constant": {"factor": 3.0000002},
    "another argument of the same shape": {"used": "v"},
    "no donation": {"donate_argnums": ()},
    "other options": {"compiler_options": {"xla_cpu_enable_fast_math": True}},
}


@pytest.mark.parametrize("name", OTHER_PROGRAMS)
def test_a_different_program_is_compiled(folder, name):
    options = OTHER_PROGRAMS[name]
    steps, compiled = start(folder, make_step(**options))
    assert compiled == len(PLAN)
    want = losses(steps)
    # It is saved alongside the other one.
    for step, result in ((make_step(**options), want), (make_step(), None)):
        steps, compiled = start(folder, step)
        assert compiled == 0 and result in (None, losses(steps))


def test_steps_that_read_different_parts_of_a_state_are_different_programs(tmp_path):
    """Their text is the same, because arguments that are not used are left out."""
    for used in STATE:

        def my_step(state, batch, used=used):
            return state[used] * jnp.sum(batch.features["x"])

        steps, compiled = start(tmp_path, jax.jit(my_step))
        assert compiled == len(PLAN)
        (batch,) = jb.sharding.prefetch_to_mesh([full_batch()], MESH)
        state = jb.sharding.replicate(STATE, MESH)
        assert steps(state, batch) == STATE[used] * batch.features["x"].sum()


def test_a_different_array_is_a_different_program(tmp_path):
    other = np.where(TABLE == 1500, 1600, TABLE)
    for table, count in ((TABLE, 2), (other, 2), (TABLE, 0)):
        assert start(tmp_path, make_step(table=table))[1] == count


@pytest.mark.parametrize("change", ["key", "version", "flags", "option", "weak type"])
def test_programs_for_a_different_environment_are_compiled(folder, monkeypatch, change):
    options = {}
    before = jax.config.values["jax_optimization_level"]
    if change == "key":
        options = {"executables_key": "b"}
    if change == "version":
        monkeypatch.setattr(jax, "__version__", "0.0.1")
    if change == "flags":
        monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=")
    if change == "option":
        jax.config.update("jax_optimization_level", "O1")
    if change == "weak type":
        options = {"state": {"v": np.float32(3), "w": 2.0}}
    try:
        assert start(folder, **options)[1] == len(PLAN)
        assert start(folder, **options)[1] == 0
    finally:
        jax.config.update("jax_optimization_level", before)


def test_programs_follow_the_settings_of_tracing(tmp_path):
    def noisy_step(state, batch):
        noise = jax.random.uniform(jax.random.key(3))
        return state, {"loss": noise * state["w"]}

    results = {}
    for prng, count in [("threefry2x32", 2), ("rbg", 2), ("threefry2x32", 0)]:
        jax.clear_caches()
        with jax.default_prng_impl(prng):
            steps, compiled = start(tmp_path, noisy_step)
        assert compiled == count
        assert results.setdefault(prng, losses(steps)) == losses(steps)
    assert results["rbg"] != results["threefry2x32"]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["name"]
)
@dataclasses.dataclass(frozen=True)
class Named:
    w: jax.Array
    name: object


def test_static_data_of_a_result_is_that_of_the_new_run(tmp_path):
    """Even if it cannot be pickled, as functions in Flax's `TrainState`."""
    for name, count in (("a", 2), (lambda: None, 0)):

        def my_step(state, batch, name=name):
            return Named(2 * state.w, name), {"loss": batch.num_tokens}

        state = Named(np.float32(2), name)
        steps, compiled = start(tmp_path, my_step, state)
        (batch,) = jb.sharding.prefetch_to_mesh([full_batch()], MESH)
        result, _ = steps(jb.sharding.replicate(state, MESH), batch)
        assert (compiled, result.w, result.name) == (count, 4, name)


# Files


def flipped(content):
    return content[:-50] + bytes([content[-50] ^ 1]) + content[-49:]


DAMAGES = {
    "empty": lambda content: b"",
    "flipped": flipped,
}


@pytest.mark.parametrize("damage", [*DAMAGES, "folder", "renamed"])
def test_a_file_that_cannot_be_read_is_named_and_compiled_again(folder, saved, damage):
    path, other = sorted(folder.iterdir())
    content = path.read_bytes()
    if damage == "renamed":
        path.write_bytes(other.read_bytes())
    elif damage == "folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(DAMAGES[damage](content))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps, compiled = start(folder)
    assert compiled == 1 and losses(steps) == saved[1]
    messages = [str(x.message) for x in caught if "compiled again" in str(x.message)]
    assert len(messages) == 1 and str(path) in messages[0]
    if damage != "folder":
        assert start(folder)[1] == 0


def test_an_unwritable_folder_causes_one_warning(tmp_path, saved):
    (tmp_path / "file").write_text("")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        steps, compiled = start(tmp_path / "file" / "folder")
    assert compiled == len(PLAN) and losses(steps) == saved[1]
    messages = [str(w.message) for w in caught if "not saved" in str(w.message)]
    assert len(messages) == 1 and str(tmp_path) in messages[0]


def test_programs_that_call_python_are_compiled_in_every_run(tmp_path):
    for _ in range(2):

        def my_step(state, batch):
            jax.debug.print("{}", state["w"])
            return state, {"loss": state["w"]}

        with pytest.warns(RuntimeWarning, match="my_step .* calls Python functions"):
            assert start(tmp_path, my_step)[1] == len(PLAN)
    assert not list(tmp_path.iterdir())


def misses(caplog):
    """Returns the messages about programs that were not found, and forgets them."""
    messages = [x for x in caplog.messages if "none of this job's programs" in x]
    caplog.clear()
    return messages


@pytest.mark.parametrize(
    ("factor", "key", "why"),
    [
        (3.0, "b", "key ''; this job has key 'b'."),
        (7.0, "", "of a different code or of different shapes."),
    ],
)
def test_a_job_without_any_of_its_programs_says_why_once(
    folder, caplog, factor, key, why
):
    start(folder, make_step(factor), executables_key=key)
    (message,) = misses(caplog)
    assert message.startswith(f"{folder} has none of this job's programs, only 2 ")
    assert message.endswith(why)
    # Now they are there. Programs of other functions do not matter.
    start(folder, make_step(factor), executables_key=key)
    start(folder, lambda state, batch: (state, batch.num_tokens))
    assert not misses(caplog)


# In other processes

START = """
import sys, warnings
import jax
sys.path.insert(0, {folder!r})
import test_executables as t

warnings.simplefilter("error", RuntimeWarning)
xla, folder = sys.argv[1:]
t.jb.compile.use_xla_cache(xla)
steps, compiled = t.start(None if folder == "none" else folder)
print(compiled, t.losses(steps))
# Jax's cache is on again.
assert jax.config.jax_enable_compilation_cache
"""


@exhaustive
def test_executables_are_for_all_processes_even_with_the_cache_of_jax(
    tmp_path, saved, python
):
    """They have their code, and do not depend on the hash seed."""
    code = START.format(folder=os.path.dirname(__file__))
    outputs = []
    for seed, folder in enumerate(["none", tmp_path / "one", tmp_path / "one"]):
        env = os.environ | {"PYTHONHASHSEED": str(seed)}
        run = python("-c", code, tmp_path / "xla", folder, env=env)
        outputs.append(run.stdout)
    assert outputs == [f"{count} {saved[1]}\n" for count in (2, 2, 0)]


LOST = """
import sys, warnings
sys.path.insert(0, {folder!r})
import test_executables as t

t.jb.compile.use_xla_cache(sys.argv[1])
(batch,) = t.jb.sharding.prefetch_to_mesh([t.full_batch()], t.MESH)
for _ in range(2):
    t.jax.clear_caches()
    step = t.make_step()
    step(t.jb.sharding.replicate(t.STATE, t.MESH), batch)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    t.start(sys.argv[2], step)
print(*[x.message for x in caught])
steps, compiled = t.start(sys.argv[2])
print(compiled, t.losses(steps))
"""


@exhaustive
def test_an_executable_that_has_lost_its_code_is_not_saved(tmp_path, saved, python):
    """As the one of a step that was called before, from the cache of jax."""
    code = LOST.format(folder=os.path.dirname(__file__))
    output = python("-c", code, tmp_path / "xla", tmp_path / "folder").stdout
    assert "my_step [8, 4] is not saved to a file: jax's compilation" in output
    assert output.endswith(f"1 {saved[1]}\n")
