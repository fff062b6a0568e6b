"""Checkpoints of a state and of its position in the data, written by Orbax.

Orbax writes in the background, and publishes a checkpoint atomically. It does not
notice files that are deleted, truncated or changed later. Every checkpoint is therefore
sealed with the sizes and digests of its files before it is published.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from typing import IO, Any, Generic, NamedTuple, TypeVar

import jax
import orbax.checkpoint as ocp
from etils import epath

from jaxbucket.base.checks import check_positive
from jaxbucket.base.notes import Noting
from jaxbucket.base.position import DataPosition
from jaxbucket.distributed.processes import Processes, list_processes
from jaxbucket.train.checkpoint_contents import (
    check_can_be_saved,
    find_damage,
    find_difference,
    find_other_key,
    like_template,
    restore_args,
    warn_of_new_constants,
    with_leaves,
    write_seal,
)

_State = TypeVar("_State")
# The operating system releases the lock when its process ends, even if it is killed.
_LOCK = ".lock"
_HALF_WRITTEN = ".orbax-checkpoint-tmp"
_JSON = ocp.args.JsonRestore()
_TOKEN = ".seen-by-all"
# A network file system may show a new file with a delay.
_SECONDS_TO_SEE = 5.0


class Restored(NamedTuple, Generic[_State]):
    """The result of `Checkpoints.restore`.

    Attributes:
      state: the state, in the requested shardings.
      position: the position in the data to resume from, for `MeshLoader.resume`.
      extra: the extra values that were saved with the state.
    """

    state: _State
    position: DataPosition
    extra: dict[str, Any]


class _Manager(ocp.CheckpointManager):
    """Orbax's manager, without its own check for preemption."""

    def reached_preemption(self, step: int) -> bool:
        # The training loop checks for preemption (`StopRequest`). jax counts the steps
        # it is asked about, and Orbax asks later, in a thread of its own, about the
        # steps of checkpoints. The processes would then not agree on the step before
        # which all of them stop.
        return False


class Checkpoints:
    """The checkpoints of a single run, in a directory.

    Example:
      >>> import tempfile, jaxbucket as jb
      >>> source = [{"x": [1, 2]}, {"x": [3]}]
      >>> plan = jb.plan_buckets([2, 1], max_tokens=4, num_buckets=1)
      >>> mesh = jb.data_mesh(jax.devices()[:1])
      >>> batches = jb.MeshLoader(source, jb.BatchSchedule(plan, [2, 1]), mesh)
      >>> with Checkpoints(tempfile.mkdtemp()) as checkpoints:
      ...     checkpoints.save({"w": jax.numpy.ones(3)}, batches.position(1))
      ...     state, position, _ = checkpoints.restore({"w": jax.numpy.zeros(3)})
      >>> print(state["w"], len(batches.resume(position)))
      [1. 1. 1.] 0

    Args:
      directory: a path, or a URL that Orbax supports, such as gs://...
      keep: how many of the newest checkpoints to keep.
      processes: the processes that save together. All of them must create this object.
        If one of them cannot write, all of them exit, because the others would
        otherwise wait forever for its part of the checkpoint.

    Raises:
      ValueError: if `keep` is not positive, or some processes do not see the files that
        process 0 writes in the directory.
      OSError: if the directory cannot be created.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 3,
        processes: Processes | None = None,
    ):
        self._directory = epath.Path(directory).expanduser().absolute()
        self._directory.mkdir(parents=True, exist_ok=True)
        self._processes = processes
        if processes is not None:
            self._check_shared(processes)
        self._manager = _Manager(
            self._directory,
            item_handlers={
                "state": ocp.PyTreeCheckpointHandler(),
                "position": ocp.JsonCheckpointHandler(),
                "extra": ocp.JsonCheckpointHandler(),
            },
            options=ocp.CheckpointManagerOptions(
                max_to_keep=check_positive("keep", keep),
                async_options=ocp.AsyncOptions(
                    post_finalization_callback=self._seal,
                    barrier_sync_fn=self._barrier,
                ),
            ),
        )
        # The step that this object last saved or restored.
        self._last: int | None = None
        # The thread that last called `save`.
        self._saving: int | None = None
        self._is_open = True
        if processes is not None:
            processes.on_exit(self._finish)
        self._claimed = False
        self._lock: IO[str] | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _barrier(self, *, key: str, timeout_ms: int) -> None:
        """Waits for all processes, in a background thread of Orbax.

        A process that could not write enters this barrier, too, before it raises its
        error. It exits here instead, and all others follow.
        """
        error = sys.exception()
        # The thread that called `save` may be handling an unrelated error.
        if error and self._processes and threading.get_ident() != self._saving:
            self._processes.fail(error)
        ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)

    def _check_shared(self, processes: Processes) -> None:
        """Raises a ValueError unless all processes see the directory of process 0.

        If each process had its own directory, saving would wait forever.
        """
        name = f"{_TOKEN}-{uuid.uuid4().hex}"
        if processes.index == 0:
            (self._directory / name).touch()
        (name, *_) = processes.gather("writing a test file", name)
        token = self._directory / name
        deadline = time.monotonic() + _SECONDS_TO_SEE
        while not (is_visible := token.exists()) and time.monotonic() < deadline:
            time.sleep(0.1)
        seen = processes.gather("finding the test file", str(is_visible))
        if processes.index == 0:
            token.unlink()
        blind = [index for index, reply in enumerate(seen) if reply != str(True)]
        if blind:
            raise ValueError(
                f"`directory={str(self._directory)!r}`: {list_processes(blind)} cannot "
                "see the files that process 0 writes there. Choose a shared directory."
            )

    def close(self) -> None:
        """Waits until the last checkpoint is written, and unlocks the directory."""
        self._is_open = False
        try:
            self._manager.close()
        finally:
            if self._lock:
                self._lock.close()
                self._lock = None

    def _finish(self) -> None:
        if self._is_open:
            self.wait()

    def wait(self) -> None:
        """Waits until the last checkpoint is written.

        Raises:
          OSError: if it could not be written, for example because the disk is full.
        """
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            failed = self._last
            self._manager.reload()
            self._last = self._manager.latest_step()
            remaining = "There is no earlier checkpoint."
            if self._last is not None:
                remaining = f"The newest checkpoint is of step {self._last}."
            raise OSError(
                f"The checkpoint of step {failed} could not be written to "
                f"{self._directory}: {error}. {remaining}"
            ) from error

    @property
    def latest_step(self) -> int | None:
        """The step of the newest checkpoint, or None if there is no checkpoint."""
        self.wait()
        return self._manager.latest_step()

    def save(
        self,
        state: Any,
        position: DataPosition,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Copies the state, and writes the copy in the background.

        The state may be donated as soon as this method returns. Nothing happens at the
        step that was last saved or restored, because the state is the same.

        Args:
          state: a pytree of arrays, the state after `position.step` updates.
          position: the position from `MeshLoader.position`, or from a dataset.
          extra: further values to save, which must be JSON serializable.

        Raises:
          ValueError: if the state contains anything but arrays and numbers, or two
            leaves with the same name; if the directory has checkpoints of a different
            run, or another run is saving there; or if the step is before the newest
            checkpoint.
          TypeError: if `extra` is not JSON serializable.
          OSError: if the previous checkpoint could not be written.
        """
        check_can_be_saved(state)
        self.claim()
        newest = self.latest_step
        if newest != self._last:
            raise ValueError(
                f"{self._directory} has a checkpoint of step {newest}, from which this "
                "run did not start. Restore it, or choose a different directory."
            )
        if newest is not None and position.step <= newest:
            if position.step == newest:
                return
            raise ValueError(
                f"`position.step={position.step}` is before step {newest}, the newest "
                f"checkpoint in {self._directory}. Choose a different directory."
            )
        # Orbax would find out in the background that a value is not serializable.
        values = json.loads(json.dumps(dict(extra or {}), allow_nan=False))
        if jax.process_index() == 0:
            # Parts that killed processes left: nothing is being written now.
            for path in self._directory.glob(f"*{_HALF_WRITTEN}*"):
                path.rmtree()
        self._last = position.step
        self._saving = threading.get_ident()
        self._manager.save(
            position.step,
            args=ocp.args.Composite(
                state=ocp.args.PyTreeSave(state),
                position=ocp.args.JsonSave(position.to_dict()),
                extra=ocp.args.JsonSave(values),
            ),
        )

    def restore(self, state: _State) -> Restored[_State]:
        """Reads the newest checkpoint.

        Args:
          state: a state like the saved one, or the shapes, dtypes and shardings of
            such a state. Arrays are read directly into these shardings. A Python
            number, such as the `step=0` of a new Flax `TrainState`, is restored as a
            Python number; weakly typed scalars stay weakly typed, and uncommitted
            arrays stay uncommitted. A step that was compiled for `state` therefore
            accepts the restored state. If it has no optimizer, as
            `create_state(model, mesh=mesh)`, that of the checkpoint is not read.
            Constants of `optax.inject_hyperparams` are those of the checkpoint, and a
            warning names those that differ.

        Returns:
          The state, the position in the data, and the extra values.

        Raises:
          ValueError: if there is no checkpoint; if one of its files is missing,
            truncated or changed; or if it was saved with a different model or
            optimizer. Nothing is written, and older checkpoints are not used instead.
        """
        step = self.latest_step
        if step is None:
            raise ValueError(
                f"There is no checkpoint in {self._directory}. Start a new run."
            )
        folder = self._directory / str(step)
        if damage := find_damage(folder):
            older = [x for x in self._manager.all_steps() if x != step]
            remedy = "There is no older checkpoint to resume from."
            if older:
                remedy = f"Delete this directory to resume from step {max(older)}."
            raise ValueError(f"The checkpoint {folder} is damaged: {damage}. {remedy}")
        metadata = self._manager.item_metadata(step).state
        if difference := find_difference(metadata, state):
            raise _different_state(folder, difference)
        items = ocp.args.Composite(
            state=restore_args(state), position=_JSON, extra=_JSON
        )
        # Optimizers may differ in states without leaves, which Orbax finds.
        with Noting(f"Is {folder} of the same model, `wrt` and optimizer?"):
            saved: Any = self._manager.restore(step, args=items)
        position = DataPosition.from_dict(saved.position)
        read = with_leaves(state, saved.state)
        if difference := find_other_key(read, state):
            raise _different_state(folder, difference)
        warn_of_new_constants(state, read)
        self._last = step
        restored = jax.tree.map(like_template, state, read)
        return Restored(restored, position, saved.extra)

    def claim(self) -> None:
        """Locks the directory, so that no other run can save there until `close`.

        The first `save` calls this method. Call it at the start of a run to fail early.

        Raises:
          ValueError: if another run is saving to this directory.
        """
        if self._claimed:
            return
        if jax.process_index() == 0 and "://" not in os.fspath(self._directory):
            self._lock = open(self._directory / _LOCK, "a")  # noqa: SIM115
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._lock.close()
                raise ValueError(
                    f"Another run is saving to {self._directory}. Wait until it has "
                    "ended, or choose a different directory."
                ) from None
            except OSError:
                # Not every file system supports locks.
                pass
        # Another run may have saved since the directory was last read.
        self._manager.reload()
        self._claimed = True

    def _seal(self) -> None:
        """Seals a checkpoint whose files are complete, before it is published."""
        if jax.process_index() != 0:
            return
        folder = self._directory / str(self._last)
        if not folder.exists():
            (folder,) = self._directory.glob(f"{self._last}{_HALF_WRITTEN}*")
        write_seal(folder)


def _different_state(folder: epath.Path, difference: str) -> ValueError:
    return ValueError(
        f"The checkpoint {folder} is of a different model or optimizer than `state`: "
        f"{difference}. Use the model, `wrt` and the optimizer that were saved, or "
        "your own pytree if that was saved."
    )
