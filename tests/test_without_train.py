"""Planning needs no library of an extra, and all else names the extra it needs."""

import os
import pathlib
import subprocess
import sys

SCRIPT = pathlib.Path(__file__).parent / "without_train.py"
# Python imports a module of this name when it starts.
HIDE = """
import sys

LIBRARIES = {
    *("absl", "flax", "grain", "jax", "jaxlib", "ml_dtypes", "optax", "orbax"),
    *("matplotlib", "pyarrow"),
}

class Hidden:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in LIBRARIES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden)
"""


def test_planning_works_without_the_extras(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(HIDE)
    paths = [tmp_path, SCRIPT.parents[1]]
    run = subprocess.run(
        [sys.executable, SCRIPT],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "jax imported: False"
