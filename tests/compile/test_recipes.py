"""Tests of precompiling the shapes of a plan: the function and the command."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

import jaxbucket as jb
from jaxbucket.cli import main
from jaxbucket.compile.recipes import precompile
from jaxbucket.compile.report import ProgramReport

ROOT = pathlib.Path(__file__).parents[2]
END_TO_END = ROOT / "benchmarks" / "end_to_end"
PLAN = jb.BucketPlan.from_shapes([(8, 4), (4, 8), (2, 16)])
MESH = jb.data_mesh(jax.devices()[:1])


def my_step(state, batch):
    if batch.bucket.seq_len == 16 and state["w"].dtype == jnp.float16:
        raise ArithmeticError("no such bucket\nin half precision")
    return state, (state["w"] * batch.features["x"]).sum()


def recipe(plan, dtype="float32"):
    """A recipe that the command finds as `test_recipes:recipe`."""
    state = jb.sharding.replicate(
        {"w": jax.ShapeDtypeStruct((), np.dtype(dtype))}, MESH
    )
    example = {"x": np.ones(3, np.dtype(dtype))}
    return jax.jit(my_step), state, jb.sharding.batch_specs(plan, example, MESH)


def both(plan):
    return {"train": recipe(plan), "eval": recipe(plan)}


def none(plan):
    return {}


def nothing(plan):
    return recipe(plan)[0]


def calling_python(plan):
    def my_step(state, batch):
        return state, jax.debug.callback(lambda x: None, state["w"])

    return my_step, *recipe(plan)[1:]


def raising(plan, kind="KeyError"):
    errors = {"SystemExit": SystemExit(7), "KeyboardInterrupt": KeyboardInterrupt()}
    raise errors.get(kind) or KeyError("no such model" + "\nmore" * 300)


def of_another_plan(plan):
    return recipe(jb.BucketPlan.from_shapes([(8, 4), (4, 9)]))


def test_the_other_buckets_are_compiled_if_one_fails(tmp_path):
    report, failures = precompile(recipe, PLAN, "float16", executables=tmp_path)
    assert [p.label for p in report.programs] == ["[4, 8]", "[8, 4]"]
    assert failures == {"step [2, 16]": "ArithmeticError: no such bucket"}


def test_a_recipe_may_have_several_steps():
    report, _ = precompile(both, PLAN)
    assert len(report.programs) == 6


@pytest.mark.parametrize(
    "invalid",
    [
        *(nothing, none, of_another_plan, lambda plan: list(recipe(plan))),
        lambda plan: {"train": recipe(plan), "eval": 3},
        lambda plan: (my_step, {}, {}),
    ],
)
def test_the_message_names_a_function_that_is_not_a_recipe(invalid):
    with pytest.raises(ValueError, match=r"The recipe .* returned") as caught:
        precompile(invalid, PLAN)
    assert invalid.__name__ in str(caught.value) and len(str(caught.value)) < 600


def test_evaluation_may_have_its_own_plan():
    def two(plan):
        return {"train": recipe(plan), "eval": of_another_plan(plan)}

    assert len(precompile(two, PLAN)[0].programs) == 5


def test_a_recipe_that_raises_is_named():
    with pytest.raises(KeyError) as caught:
        precompile(raising, PLAN)
    (note,) = caught.value.__notes__
    assert "test_recipes:raising" in note


@pytest.fixture(name="plan")
def plan_fixture(tmp_path, monkeypatch):
    """The file of the plan. The working directory contains this module's recipes."""
    monkeypatch.chdir(pathlib.Path(__file__).parent)
    path = tmp_path / "plan.json"
    path.write_text(PLAN.to_json())
    return path


def command(*args):
    return CliRunner().invoke(main, ["precompile", *map(str, args)])


def test_the_command_fills_the_folder_and_prints_a_table(plan, tmp_path):
    jax.clear_caches()
    cache = tmp_path / "cache"
    run = command("--recipe", "test_recipes:recipe", "--plan", plan, "--cache", cache)
    assert run.exit_code == 0, run.output
    assert "my_step [2, 16]" in run.output and "peak" in run.output
    assert len(list(cache.glob("*.executable"))) == 3
    options = ("--recipe", "test_recipes:recipe", "--plan", plan, "--cache", cache)
    run = command(*options, "--json")
    numbers = json.loads(run.output)
    assert numbers["seconds"] > 0
    assert [p["source"] for p in numbers["programs"]] == ["loaded"] * 3
    assert numbers["above"] == [] and numbers["cache"] == str(cache)
    assert numbers["not_kept"] == []
    # Programs of another key are others.
    numbers = json.loads(command(*options, "--json", "--key", "2").output)
    assert [p["source"] for p in numbers["programs"]] == ["compiled"] * 3


@pytest.mark.parametrize("option", ["--cache", "--xla-cache"])
def test_a_folder_that_cannot_be_written_is_named_first(plan, tmp_path, option):
    folder = tmp_path / "plan.json" / "new"
    with jb.compile.count_compiles() as compiles:
        run = command(
            *("--recipe", "test_recipes:recipe", "--plan", plan, option, folder)
        )
    assert run.exit_code == 1 and not compiles
    assert run.output.startswith("Error: ") and "plan.json" in run.output


def test_the_command_fails_if_executables_cannot_be_saved(plan, tmp_path):
    options = ("--recipe", "test_recipes:calling_python", "--plan", plan, "--json")
    with pytest.warns(RuntimeWarning, match="is not saved to a file"):
        run = command(*options, "--cache", tmp_path)
    assert run.exit_code == 1
    assert f"my_step [2, 16] could not be stored in {tmp_path}, so" in run.stderr
    assert len(json.loads(run.stdout)["not_kept"]) == 3


def test_the_command_fails_if_a_bucket_fails(plan):
    options = ("--recipe", "test_recipes:recipe", "--plan", plan)
    run = command(*options, "--", "float16")
    assert run.exit_code == 1
    assert "step [2, 16]: ArithmeticError: no such bucket" in run.stderr
    assert "[4, 8]" in run.stdout
    numbers = json.loads(command(*options, "--json", "--", "float16").stdout)
    assert len(numbers["programs"]) == 2 and len(numbers["failures"]) == 1
    run = command(*options, "--memory-gb", 1e-9, "--json")
    assert run.exit_code == 1
    assert "my_step [2, 16] needs 0.00" in run.stderr
    assert len(json.loads(run.stdout)["above"]) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--recipe", "test_recipes:other"), "no attribute 'other'"),
        (("--recipe", "recipe"), "as `module:function`"),
        (("--recipe", "test_recipes:nothing"), "return (step_fn, state, specs)"),
        (("--recipe", "test_recipes:recipe", "--memory-gb", 0), "--memory-gb"),
        (("--recipe", "test_recipes:recipe", "--workers", 0), "--workers"),
    ],
)
def test_invalid_options_of_the_command_are_named(plan, tmp_path, options, message):
    run = command("--plan", plan, "--cache", tmp_path / "cache", *options)
    assert run.exit_code != 0
    assert len(run.output.splitlines()) < 10
    assert message in " ".join(run.output.split()), run.output


def test_a_recipe_that_ends_the_program_ends_the_command(plan):
    options = ("--recipe", "test_recipes:raising", "--plan", plan, "--")
    assert command(*options, "SystemExit").exit_code == 7
    interrupted = command(*options, "KeyboardInterrupt")
    assert interrupted.exit_code == 1 and "Aborted!" in interrupted.output


def test_a_file_that_is_not_a_plan_is_refused(plan):
    plan.write_text(plan.read_text()[:20])
    run = command("--recipe", "test_recipes:recipe", "--plan", plan)
    assert run.exit_code == 1 and "plan.json" in run.output


@pytest.mark.exhaustive
def test_a_training_job_loads_what_precompile_has_compiled(tmp_path, python):
    """From a file of lengths to a training job that compiles nothing."""
    lines = "".join(
        json.dumps({"text": f"document {n} " + "x" * (n % 90)}) + "\n"
        for n in range(200)
    )
    (tmp_path / "data.jsonl").write_text(lines)
    plan = jb.BucketPlan.from_shapes([(8, 32), (4, 64), (4, 128)])
    (tmp_path / "plan.json").write_text(plan.to_json())
    arguments = (
        *("--data", tmp_path / "data.jsonl", "--plan", tmp_path / "plan.json"),
        *("--steps", 6, "--width", 16, "--layers", 1, "--max-len", 128),
        *("--max-tokens", 512, "--devices", 2),
    )
    run = python(
        *(ROOT / "scripts" / "precompile_shapes.py", "--recipe", "training:steps"),
        *("--plan", tmp_path / "plan.json", "--cache", tmp_path / "cache", "--json"),
        *("--", *arguments),
        cwd=END_TO_END,
    )
    programs = json.loads(run.stdout)["programs"]
    assert sorted(p["name"] for p in programs) == ["eval_step"] * 3 + ["train_step"] * 3
    assert all(p["temporary_bytes"] > 0 for p in programs)
    out = tmp_path / "out.json"
    python(
        *(END_TO_END / "run.py", *arguments),
        *("--executables", tmp_path / "cache", "--json", out),
    )
    for name in ("train_step", "eval_step"):
        compiled = json.loads(out.read_text())["compile"][name]
        assert (compiled["ahead"], compiled["later"]) == (0, 0)


# A training script with its own model and recipe.
SCRIPT = """
import os, sys
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx
import jaxbucket as jb

def look_up(w, x):
    return w[x]

class Model(nnx.Module):
    def __init__(self):
        self.w, self.function = nnx.Param(jnp.zeros(9)), look_up

def loss(model, batch, keys):
    y = model.function(model.w[...], batch.features["x"])
    return jnp.sum(y * batch.mask), batch.num_tokens

def steps(plan):
    mesh, tx = jb.data_mesh(), optax.sgd(0.1)
    specs = jb.sharding.batch_specs(plan, {"x": np.zeros(3, int)}, mesh)
    state = jb.create_state(Model(), tx, mesh)
    return jb.make_train_step(loss, tx, mesh), state, specs

def train():
    with open("plan.json") as file:
        plan = jb.BucketPlan.from_json(file.read())
    compiled = jb.compile_steps(*steps(plan), executables="cache")
    return [program.source for program in compiled.report.programs]
"""
RUN = """
if __name__ == "__main__":
    print(*train())
"""
# Connects in one of three ways. Each process becomes the command, or trains.
RUN_TOGETHER = """
command = os.environ.get("COMMAND")
if __name__ == "__main__" and command:
    os.execv(sys.executable, [sys.executable, *command.split()])
way = os.environ["WAY"]
if way != "variables":
    address, count, index = (
        os.environ.pop("JAX_" + name)
        for name in ("COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID")
    )
if way == "initialize":
    jax.distributed.initialize(address, int(count), int(index))
elif way == "slurm":
    os.environ |= {
        "SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "localhost,other",
        "SLURM_NTASKS": count, "SLURM_STEP_NUM_TASKS": count,
        "SLURM_PROCID": index, "SLURM_LOCALID": index,
        "JAX_COORDINATOR_PORT": address.rpartition(":")[2],
    }
if __name__ == "__main__":
    with jb.Processes() as processes:
        sources = train()
    os.environ["JAX_PROCESS_ID"] = str(processes.index)
    record(processes.count, *sources)
"""


OPTIONS = "--plan plan.json --cache cache --recipe"


@pytest.fixture(name="project")
def project_fixture(tmp_path, monkeypatch):
    """The working directory, with a plan for the devices of all processes."""
    plan = jb.BucketPlan.from_shapes([(16, 4), (8, 8)])
    (tmp_path / "plan.json").write_text(plan.to_json())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["variables", "slurm", "initialize"])
def test_processes_precompile_for_as_many_processes(launch, project, monkeypatch, way):
    monkeypatch.setenv("WAY", way)
    monkeypatch.setenv("COMMAND", f"-m jaxbucket precompile {OPTIONS} script:steps")
    why = "only 2 programs for 1 process, "
    for count in (1, 2):
        run = launch(SCRIPT + RUN_TOGETHER, count=count, devices=2)
        assert run.status == 0, run.output
        # Only the first process prints messages and a report.
        for text in (f"cache has none of this job's programs, {why}", "2 processes, "):
            assert run.output.count(text) == count - 1
        assert "train_step" in "\n".join(run.lines(0))
        assert "train_step" not in "\n".join(run.lines(1))
    monkeypatch.delenv("COMMAND")
    run = launch(SCRIPT + RUN_TOGETHER, devices=2)
    assert run.status == 0 and "none of this job" not in run.output, run.output
    assert [run.recorded(i) for i in range(2)] == [["2 loaded loaded"]] * 2


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("path", "command", "recipe"),
    [
        ("train.py", "train.py", "train:steps"),
        ("train.py", "-m train", "train:steps"),
        ("package/train.py", "-m package.train", "package.train:steps"),
        ("package/train.py", "package/train.py", "package.train:steps"),
    ],
)
def test_classes_of_the_script_are_found(project, python, path, command, recipe):
    (project / "package").mkdir()
    (project / path).write_text(SCRIPT + RUN)

    python(*f"-m jaxbucket precompile {OPTIONS} {recipe}".split())
    run = python(*command.split())
    assert run.stdout.endswith("loaded loaded\n") and "Warning" not in run.stderr


@pytest.mark.parametrize("file", [None, "0123456789abcdef.executable"])
def test_a_report_of_large_numbers_has_80_columns_and_explains_them(capsys, file):
    program = ProgramReport(
        *("train_step", "[128, 4096]", "compiled", 12.34, 123.45, 0.0),
        *(3_000_000_000, 1_000_000_000, 0, 22_000_000_000),
        file=file,
    )
    print(jb.compile.CompileReport((program,)))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 + 8 * (file is not None)
    header, _, row, _, *caption = lines
    names = header.split()
    numbers = ["12.34", "123.45", "3000", "0.0", "1000", "22000", "26000"]
    assert row.split()[3:] == [*numbers, *["012345"] * (file is not None)]
    # The caption explains every column.
    assert all(name in " ".join(caption) for name in names[1:])
