"""Checkpoints of a state and of its place in the data, written by Orbax.

Orbax writes beside the training and makes a checkpoint appear whole or not at all. What
it does not notice later is a file that was deleted, cut or changed: so every checkpoint
is sealed with the sizes and digests of its files before it appears.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from etils import epath

from jaxbucket.checks import check_positive
from jaxbucket.position import DataPosition

_SEAL = "seal.json"
# Orbax notes in it when the checkpoint appeared, after the seal.
_STAMP = "_CHECKPOINT_METADATA"


class Restored(NamedTuple):
    """What `Checkpoints.restore` returns.

    Attributes:
      state: the state, in the shardings asked for.
      position: where in the data to go on, for `BatchDataset.resume`.
      extra: what else was saved.
    """

    state: Any
    position: DataPosition
    extra: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run, in a directory of their own.

    Example:
      >>> import tempfile, jaxbucket as jb
      >>> source = [{"x": [1, 2]}, {"x": [3]}]
      >>> plan = jb.plan_buckets([2, 1], max_tokens=4)
      >>> dataset = jb.batch_dataset(source, jb.BatchSchedule(plan, [2, 1]))
      >>> with Checkpoints(tempfile.mkdtemp()) as checkpoints:
      ...     checkpoints.save({"w": jax.numpy.ones(3)}, dataset.position(1))
      ...     state, position, _ = checkpoints.restore({"w": jax.numpy.zeros(3)})
      >>> print(state["w"], len(dataset.resume(position)))
      [1. 1. 1.] 0

    Args:
      directory: a path, or a URL that Orbax knows, such as gs://...
      keep: how many of the newest checkpoints stay.

    Raises:
      ValueError: if `keep` is not positive, or the directory is a file.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 3):
        self._directory = epath.Path(directory).expanduser().absolute()
        if self._directory.exists() and not self._directory.is_dir():
            raise ValueError(
                f"`directory={str(directory)!r}` is a file: name a folder, new or old."
            )
        self._manager = ocp.CheckpointManager(
            self._directory,
            item_handlers={
                "state": ocp.StandardCheckpointHandler(),
                "position": ocp.JsonCheckpointHandler(),
                "extra": ocp.JsonCheckpointHandler(),
            },
            options=ocp.CheckpointManagerOptions(
                max_to_keep=check_positive("keep", keep),
                # What a killed process left half written.
                cleanup_tmp_directories=True,
                async_options=ocp.AsyncOptions(post_finalization_callback=self._seal),
            ),
        )
        self._saving: int | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Waits until what is being written is there."""
        self._manager.close()

    @property
    def latest_step(self) -> int | None:
        """The newest checkpoint's step, or None if there is none."""
        self._manager.wait_until_finished()
        return self._manager.latest_step()

    def save(
        self,
        state: Any,
        position: DataPosition,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Copies the state, and returns while it is being written.

        The state may be donated at once. At a step that is saved already it does
        nothing: the same step has the same state.

        Args:
          state: a pytree of arrays, as after `position.step` updates.
          position: from `BatchDataset.position`.
          extra: what else to keep, for JSON.
        """
        if position.step in self._manager.all_steps():
            return
        self._manager.wait_until_finished()
        self._saving = position.step
        self._manager.save(
            position.step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state),
                position=ocp.args.JsonSave(position.to_dict()),
                extra=ocp.args.JsonSave(dict(extra or {})),
            ),
        )

    def restore(self, state: Any) -> Restored:
        """Reads the newest checkpoint.

        Args:
          state: a state like the one saved, or the shapes, dtypes and shardings of
            one; arrays are read straight into these shardings.

        Raises:
          ValueError: if there is no checkpoint, a file of it is missing, cut or
            changed, or the state was of another model or optimizer. Nothing is
            written, and no other checkpoint is taken instead.
        """
        step = self.latest_step
        if step is None:
            raise ValueError(f"There is no checkpoint in {self._directory}.")
        folder = self._directory / str(step)
        self._check_seal(folder)
        abstract = jax.tree.map(_abstract, state)
        self._check_state(folder, step, abstract)
        saved: Any = self._manager.restore(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(abstract),
                position=ocp.args.JsonRestore(),
                extra=ocp.args.JsonRestore(),
            ),
        )
        return Restored(
            saved.state, DataPosition.from_dict(saved.position), saved.extra
        )

    def _seal(self) -> None:
        """Called when all files are written, before the checkpoint appears."""
        if jax.process_index() != 0:
            return
        folder = self._directory / str(self._saving)
        if not folder.exists():
            (folder,) = self._directory.glob(f"{self._saving}.orbax-checkpoint-tmp*")
        files = {
            path.relative_to(folder).as_posix(): _digest(path)
            for path in _files(folder)
        }
        (folder / _SEAL).write_text(json.dumps(files))

    def _check_seal(self, folder: epath.Path) -> None:
        try:
            files = json.loads((folder / _SEAL).read_text())
        except FileNotFoundError:
            raise ValueError(self._damaged(folder, _SEAL, "is missing")) from None
        except ValueError:
            raise ValueError(self._damaged(folder, _SEAL, "is cut")) from None
        if not isinstance(files, dict):
            raise ValueError(self._damaged(folder, _SEAL, "is none"))
        for name, (size, digest) in files.items():
            path = folder / name
            if not path.exists():
                raise ValueError(self._damaged(folder, name, "is missing"))
            if name == _STAMP:
                if not _is_json(path):
                    raise ValueError(self._damaged(folder, name, "is cut"))
                continue
            if path.stat().length != size:
                is_ = f"has {path.stat().length} bytes, not {size}"
                raise ValueError(self._damaged(folder, name, is_))
            if _digest(path)[1] != digest:
                raise ValueError(self._damaged(folder, name, "was changed"))

    def _damaged(self, folder: epath.Path, name: str, is_: str) -> str:
        older = [step for step in self._manager.all_steps() if str(step) != folder.name]
        remedy = (
            f"delete that folder to go on from step {max(older)}"
            if older
            else "there is no older one to go on from"
        )
        return f"The checkpoint {folder} is damaged, for {name} {is_}: {remedy}."

    def _check_state(self, folder: epath.Path, step: int, abstract: Any) -> None:
        saved = _shapes(self._manager.item_metadata(step).state)
        given = _shapes(abstract)
        # What was chosen is named before what follows from it.
        order = sorted(
            saved.keys() | given.keys(), key=lambda n: ("params" not in n, n)
        )
        for name in order:
            was, now = saved.get(name, "not there"), given.get(name, "not there")
            if was != now:
                raise ValueError(
                    f"The checkpoint {folder} is of another model or optimizer, for "
                    f"{name} is {now}, but was {was}: build what was saved."
                )


def _abstract(leaf: Any) -> Any:
    return ocp.utils.to_shape_dtype_struct(leaf)


def _shapes(tree: Any) -> dict[str, str]:
    return {
        name: f"{leaf.dtype}{list(leaf.shape)}"
        for name, leaf in ocp.tree.to_flat_dict(tree, sep=".").items()
        if hasattr(leaf, "shape")
    }


def _is_json(path: epath.Path) -> bool:
    try:
        json.loads(path.read_text())
    except ValueError:
        return False
    return True


def _files(folder: epath.Path) -> Iterator[epath.Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            yield from _files(path)
        else:
            yield path


def _digest(path: epath.Path) -> tuple[int, str]:
    """The size of a file, and a digest of what is in it."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, _blake2b)  # pyright: ignore
    return path.stat().length, digest.hexdigest()


def _blake2b() -> Any:
    return hashlib.blake2b(digest_size=16)
