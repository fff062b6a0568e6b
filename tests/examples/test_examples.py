"""The short examples: what each of them prints or writes, by running it."""

import itertools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxbucket as jb

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SMALL = (
    *("--field", "body", "--steps", "6", "--width", "16", "--layers", "1"),
    *("--max-len", "64", "--max-tokens", "512", "--num-buckets", "2"),
    *("--batch-size-multiple", "8"),
)


def train(example, tmp_path: pathlib.Path, *options: object) -> dict:
    out = tmp_path / "summary.json"
    command = [*SMALL, "--json", out, *options]
    assert example("train_lm").main(list(map(str, command))) == 0
    return json.loads(out.read_text())


def run(*command: object, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )


def losses(text: str, pattern: str) -> list[float]:
    return [float(loss) for loss in re.findall(pattern, text)]


@pytest.mark.exhaustive
def test_train_lm_compiles_everything_before_the_first_step(example, jsonl, tmp_path):
    packed = ("--pack", "always", "--steps", 12)
    summary = train(example, tmp_path, "--data", jsonl, *packed)
    assert summary["step"] == 12
    # Two steps, in two shapes each.
    assert (summary["compiled_ahead"], summary["compiled_later"]) == (4, 0)
    assert 0 < summary["held_out_bits_per_byte"] < 8.01
    assert summary["bytes_per_second"] > 0


@pytest.mark.exhaustive
def test_train_lm_continues_from_its_checkpoint(example, jsonl, tmp_path, capsys):
    folder = tmp_path / "executables"
    options = ("--data", jsonl, "--num-buckets", 1, "--executables", folder)
    whole = train(example, tmp_path, *options)
    assert (whole["compiled_ahead"], whole["compiled_later"]) == (2, 0)
    position, requests = jb.MeshLoader.position, [signal.SIGTERM]

    def interrupt(loader, step):
        if step == 3 and requests:
            signal.raise_signal(requests.pop())
        return position(loader, step)

    saving = ("--checkpoint", tmp_path / "run", "--save-every", 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jb.MeshLoader, "position", interrupt)
        status = example("train_lm").main([*SMALL, *map(str, (*options, *saving))])
    assert status == 128 + signal.SIGTERM
    assert "Stopped by SIGTERM after step 3" in capsys.readouterr().out
    resumed = train(example, tmp_path, *options, *saving)
    assert "Continuing after step 3." in capsys.readouterr().out
    assert resumed["held_out_bits_per_byte"] == whole["held_out_bits_per_byte"]
    assert resumed["compiled_ahead"] == resumed["compiled_later"] == 0
    # A run that has ended is only evaluated.
    again = train(example, tmp_path, *options, *saving)
    assert again["held_out_bits_per_byte"] == whole["held_out_bits_per_byte"]
    assert again["bits_per_byte"] is None
    with pytest.raises(ValueError, match="schedule seed 0 -> 1"):
        train(example, tmp_path, *options, *saving, "--seed", 1)


@pytest.mark.exhaustive
def test_the_recipe_compiles_what_train_lm_runs(example, jsonl, tmp_path):
    from jaxbucket.compile.recipes import precompile

    folder = tmp_path / "executables"
    plan = {"max_tokens": 512, "batch_size_multiple": 8, "seq_len_multiple": 32}
    lengths = [64] * 8 + [32] * 16
    shapes = jb.plan_buckets(lengths, num_buckets=2, **plan)
    options = ("--steps", "6", "--width", "16", "--layers", "1")
    recipe = example("recipe")
    precompile(recipe.steps, shapes, *options, executables=folder)
    summary = train(example, tmp_path, "--data", jsonl, "--executables", folder)
    assert (summary["compiled_ahead"], summary["compiled_later"]) == (0, 0)


@pytest.mark.exhaustive
def test_train_lm_refuses_unreadable_data_in_one_sentence(tmp_path):
    path = tmp_path / "nowhere.txt"
    ended = run("-W", "error", EXAMPLES / "train_lm.py", "--data", path)
    assert ended.returncode == 1
    message = f"train_lm.py: `--data {path}` does not exist. Check the path.\n"
    assert ended.stderr == message


@pytest.mark.exhaustive
def test_train_lm_has_the_same_result_in_one_and_two_processes(
    example, jsonl, tmp_path
):
    out = tmp_path / "two.json"
    ended = run(
        *(ROOT / "scripts" / "launch_local.py", "-n", 2, "-d", 2, "--"),
        *(sys.executable, "-W", "error", EXAMPLES / "train_lm.py", *SMALL),
        *("--data", jsonl, "--json", out),
    )
    assert ended.returncode == 0, ended.stdout
    # Only the first process prints.
    assert ended.stdout.count("held_out_bits_per_byte") == 1
    one, two = train(example, tmp_path, "--data", jsonl), json.loads(out.read_text())
    assert two["compiled_later"] == 0
    assert two["held_out_bits_per_byte"] == pytest.approx(
        one["held_out_bits_per_byte"], rel=1e-5
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_devices", [1, 8])
def test_train_lm_runs_with_its_defaults(tmp_path, num_devices):
    """With a smaller model and fewer documents."""
    out, data = tmp_path / "summary.json", tmp_path / "documents.txt"
    data.write_text("\n".join(str(n) * n for n in range(1, 400)))
    ended = run(
        *("-W", "error", EXAMPLES / "train_lm.py", "--steps", 1, "--width", 16),
        *("--layers", 1, "--json", out, "--data", data),
        XLA_FLAGS=f"--xla_force_host_platform_device_count={num_devices}",
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(out.read_text())["held_out_bits_per_byte"] < 9.5


@pytest.mark.parametrize("layers", [1, 3])
def test_no_two_dropouts_of_the_transformer_have_the_same_mask(example, layers):
    module, masks, width = example("transformer"), [], 16

    class Recorded(module.Block):
        def _drop(self, x, keys):
            dropped = super()._drop(jnp.ones_like(x), keys)
            masks.extend(np.asarray(dropped) == 0)
            return x

    model = module.Transformer(width, layers, 0.5, nnx.Rngs(0))
    blocks = (Recorded(width, 0.5, nnx.Rngs(0)) for _ in range(layers))
    model.blocks = nnx.List(blocks)
    tokens = jnp.zeros((2, 64), jnp.int32)
    for seed in range(2):
        keys = jax.random.split(jax.random.key(seed), 2)
        model(tokens, tokens, keys)
    # Two seeds, two rows, and two dropouts in each layer.
    assert len(masks) == 8 * layers
    for first, second in itertools.combinations(masks, 2):
        assert 0.4 < np.mean(first == second) < 0.6


@pytest.mark.exhaustive
def test_own_step_linen_learns_with_one_compilation_per_bucket(example, capsys):
    example("own_step_linen").main(["--epochs", "2"])
    printed = capsys.readouterr().out
    first, last = losses(printed, r"loss ([\d.]+)")
    assert last < first < np.log(2)
    assert "4 compilations for 4 buckets" in printed


@pytest.mark.exhaustive
def test_own_step_nnx_learns_with_one_trace_per_bucket(example, capsys):
    module = example("own_step_nnx")
    module.traces.clear()
    module.main(["--epochs", "2"])
    first, last = losses(capsys.readouterr().out, r"([\d.]+) nats per digit")
    assert last < first < np.log(10)
    assert len(module.traces) == 4 and set(module.traces.values()) == {1}


@pytest.mark.exhaustive
def test_score_writes_a_score_per_example_in_source_order(example, tmp_path, capsys):
    module, path = example("score"), tmp_path / "scores.npy"
    module.main(["--output", str(path)])
    scores, texts = np.load(path), list(module.docstrings().values())
    assert len(scores) == len(texts) > 100
    source = [
        {"tokens": np.frombuffer(text.encode("ascii", "replace"), np.uint8)}
        for text in texts
    ]
    logits = module.bigram_model(source)["logits"]
    for score, example in zip(scores, source, strict=True):
        tokens = example["tokens"]
        nats = -logits[np.append(module.START, tokens[:-1]), tokens]
        np.testing.assert_allclose(score, nats.mean(), rtol=1e-4)
    assert f"{len(texts)} scores in {path}" in capsys.readouterr().out


def test_plan_with_numpy_plans_without_jax():
    ended = run("-W", "error", EXAMPLES / "plan_with_numpy.py")
    assert ended.returncode == 0, ended.stderr
    assert "every example once: True" in ended.stdout
    assert "jax imported: False" in ended.stdout
    # All workers have the same shape.
    shapes = re.findall(r"worker \d: tokens (\(.*?\))", ended.stdout)
    assert len(shapes) == 4 and len(set(shapes)) == 1
