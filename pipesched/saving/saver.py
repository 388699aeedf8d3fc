"""Saver: saves a running pipeline and loads checkpoints into it. All processes take part."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from pipesched.checks import as_path, check_type, is_count, shown
from pipesched.errors import CheckpointError, DamagedCheckpointError, InputError
from pipesched.runtime.rank_host import RankHost
from pipesched.saving.capturing import capture
from pipesched.saving.collective_work import BackgroundCall, Others, StuckError, agreed, in_all, together
from pipesched.saving.host_buffers import HostBuffers, wait_for_devices
from pipesched.saving.live_run import LiveRun
from pipesched.saving.optimizer_states import GivenOptimizers
from pipesched.saving.reading import OpenCheckpoint, checkpoint_folders, given_state
from pipesched.saving.restoring import Restored, Restoring
from pipesched.saving.rollback import Rollback
from pipesched.saving.saved_run import CheckpointPart, SavedRun
from pipesched.saving.tensor_files import file_order
from pipesched.saving.writing import Target, begin, check_shared, write
from pipesched.user_warning import warn

__all__ = ["Saver"]

_PARTS = ("tensors", "entries", "values", "step", "seed", "settings", "plan")  # the keys of a training state


class Saver:
    """Saves and loads a pipeline. At most one asynchronous save runs at a time."""

    def __init__(self) -> None:
        self._work: BackgroundCall[None] | None = None  # an asynchronous save that nobody has waited for
        self._left: BackgroundCall[None] | None = None  # a save that was given up, because it was stuck
        self._others = Others()
        self._buffers = HostBuffers()

    def save(
        self,
        run: LiveRun,
        path: Any,
        states: tuple[GivenOptimizers | None, Any, Mapping[str, Any] | None],
        *,
        asynchronous: bool,
        keep: int | None,
    ) -> None:
        """Save a run. ``states`` is (optimizer, scheduler, extra), as passed by the user."""
        self.finish(run)
        host = run.host
        agreed(host, self._check_none_is_stuck)
        path = as_path(path)
        if keep is not None and not is_count(keep):
            raise InputError(
                f"keep= must be the number of checkpoints to keep, at least 1; got {shown(keep)}; pass a number such "
                f"as 3, or leave keep= out for one checkpoint"
            )
        asked = host.collectives.gathered_in_all((asynchronous, keep))
        if any(other != asked[0] for other in asked):
            raise InputError(
                f"every rank must pass the same asynchronous= and keep= to save; ranks 0 to {len(asked) - 1} passed "
                f"(asynchronous, keep) = {', '.join(map(str, asked))}; pass the same values on every rank"
            )
        part = capture(run, *states)
        begun = agreed(host, lambda: "" if run.process else begin(path, run.facts.step, keep))
        target = Target(
            path=path,
            folder=path if keep is None else path / f"step-{run.facts.step:08}",
            data=host.collectives.gathered_in_all(begun)[0],
            keep=keep,
            process=run.process,
            num_processes=run.num_processes,
            writers=run.writers,
            numbered=run.numbered,
            names=host.grid.names,
            timeout_s=math.inf if host.grid.timeout_s is None else host.grid.timeout_s,
        )
        agreed(host, lambda: check_shared(target))
        others = self._others = Others(lambda: host.executor.closed)
        if not asynchronous:
            agreed(host, lambda: wait_for_devices(part.tensors.values()))
            work = self._left = BackgroundCall(lambda: write(target, part, run.facts, others))
            work.begin(host)
            together(host, work, others)
            return
        buffers = self._buffers
        copy = CheckpointPart(self._copied(run, part), part.entries, part.values)

        def write_copy() -> None:
            buffers.wait()
            write(target, copy, run.facts, others)

        self._work = BackgroundCall(write_copy)
        self._work.start(host)
        self._work.end_at_exit(host.grid.timeout_s)

    def _copied(self, run: LiveRun, part: CheckpointPart) -> dict[str, Tensor]:
        """Start copying the tensors that this process saves to host memory. Collective."""
        buffers = self._buffers
        if run.split is None:
            return agreed(run.host, lambda: buffers.copied(part.tensors))
        writes = run.process in run.writers
        agreed(run.host, lambda: buffers.reserve(part.tensors if writes else {}, part.wholes))
        with run.host.collectives.stopping_all("save"):
            if writes:
                return buffers.copied(part.tensors, part.wholes)
            part.wholes.finish()
            return {}

    def finish(self, run: LiveRun) -> None:
        """Wait until an asynchronous save has ended in all processes. If the save failed, all processes raise."""
        work, self._work = self._work, None
        if work is not None:
            self._left = work
            together(run.host, work, self._others)

    def close(self, host: RankHost) -> None:
        """Wait until an asynchronous save has ended in this process. Raises CheckpointError if it fails or is stuck."""
        work, self._work = self._work, None
        if work is None:
            return
        if not work.ends(host.grid.timeout_s):
            raise CheckpointError(
                f"an asynchronous save must end before the pipeline is closed; {work.why_stuck}; check the file system"
            )
        _ = work.result

    def _check_none_is_stuck(self) -> None:
        """Raise CheckpointError if a save that was given up has still not ended, because it could disturb a new one."""
        if self._left is not None and not self._left.ended(0):
            raise CheckpointError(
                f"a new save must not begin before the last one has ended; in the last one {self._left.why_stuck}; "
                f"check the file system, and save again, or restart the run from an earlier checkpoint"
            )
        self._left = None

    def load(
        self, run: LiveRun, path: Any, states: tuple[GivenOptimizers | None, Any, Mapping[str, Any] | None]
    ) -> Restored:
        """Load the newest undamaged checkpoint at a path. ``states`` is (optimizer, scheduler, extra)."""
        self.finish(run)
        path = as_path(path)
        folders = run.host.collectives.gathered_in_all(
            agreed(run.host, lambda: [str(one) for one in _folders(path, run)])
        )[0]
        damage: DamagedCheckpointError | None = None
        for folder in folders:
            try:
                checkpoint, restoring = _prepared(run, Path(folder), states)
            except DamagedCheckpointError as error:
                damage = error
                if folder != folders[-1]:
                    warn(f"{error}; load now tries the previous checkpoint")
                continue
            return _apply(run, checkpoint.saved, restoring)
        raise damage or DamagedCheckpointError(
            f"a path to load must hold a checkpoint; {path} has none; check the path, or save a checkpoint first"
        )

    def training_state(
        self, run: LiveRun, states: tuple[GivenOptimizers | None, Any, Mapping[str, Any] | None]
    ) -> dict[str, Any]:
        """Return the part of a run that this process saves, as a dict of tensors and plain values."""
        part = capture(run, *states)
        if run.split is not None:
            with run.host.collectives.stopping_all("training_state"):
                part = _made_whole(part, writes=run.process in run.writers)
        entries = {key: entry.to_dict() for key, entry in part.entries.items()}
        facts = run.facts
        return {
            "step": facts.step,
            "seed": facts.seed,
            "settings": dict(facts.settings),
            "plan": dict(facts.plan),
            "values": part.values,
            "entries": entries,
            "tensors": part.tensors,
        }

    def load_training_state(
        self,
        run: LiveRun,
        state: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        states: tuple[GivenOptimizers | None, Any, Mapping[str, Any] | None],
    ) -> Restored:
        """Load the dict that ``training_state`` returned, or a list of the dicts that it returned in all processes."""
        self.finish(run)
        parts = [state] if isinstance(state, Mapping) else list(state)

        def prepared() -> tuple[SavedRun, Restoring]:
            if not parts:
                raise CheckpointError(
                    "load_training_state requires a training state; got an empty list; pass the training states of all "
                    "ranks"
                )
            for part in parts:
                check_type(part, Mapping, "a training state must be the dict that training_state returned", "pass it")
                missing = [name for name in _PARTS if name not in part]
                if missing:
                    raise CheckpointError(
                        f"a training state must be the dict that training_state returned; the dict that was "
                        f"passed has no {missing[0]!r}; pass the returned dict unchanged"
                    )
            saved = given_state(parts)
            return saved, Restoring(saved, run, *states)

        return _apply(run, *agreed(run.host, prepared))


def _made_whole(part: CheckpointPart, *, writes: bool) -> CheckpointPart:
    """Return the part of a training state, with whole tensors in host memory, or no tensors if it ``writes`` none."""
    if not writes:
        part.wholes.finish()
        return CheckpointPart()
    keys = file_order(part.tensors)
    made = {key: part.wholes.get(key, part.tensors[key]).cpu() for key in keys if key in part.wholes}
    return CheckpointPart({**part.tensors, **made}, part.entries, part.values)


def _folders(path: Path, run: LiveRun) -> list[Path]:
    return checkpoint_folders(path) if run.process == 0 else []


def _prepared(
    run: LiveRun, folder: Path, states: tuple[GivenOptimizers | None, Any, Mapping[str, Any] | None]
) -> tuple[OpenCheckpoint, Restoring]:
    """Open a checkpoint in all processes, and check that the checkpoint is undamaged and fits the run."""

    def prepare() -> tuple[OpenCheckpoint, Restoring]:
        checkpoint = OpenCheckpoint(folder)
        restoring = Restoring(checkpoint.saved, run, *states)
        checkpoint.check_files_of(restoring.needed)
        return checkpoint, restoring

    checkpoint, restoring = in_all(run.host, prepare)
    digests = run.host.collectives.gathered_in_all(hashlib.sha256(checkpoint.text).hexdigest())
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise CheckpointError(
            f"all ranks must load the same checkpoint; in {folder}, rank {others[0]} of {len(digests)} found a "
            f"different checkpoint than rank 0; pass the same path on every rank, on a file system that all hosts share"
        )
    return checkpoint, restoring


def _apply(run: LiveRun, saved: SavedRun, restoring: Restoring) -> Restored:
    restoring.warn()
    states = in_all(run.host, lambda: restoring.extra_states(saved.read))
    rollback = Rollback()
    try:
        in_all(run.host, lambda: restoring.load_objects(states, rollback), stops=True)
        in_all(run.host, lambda: restoring.load_states(saved.read, rollback), stops=True)
    except StuckError:
        raise  # the user's code still runs
    except BaseException:
        if run.host.executor.closed:
            rollback.undo()  # another process has failed
        else:
            in_all(run.host, rollback.undo)
        raise

    def apply() -> None:
        wait_for_devices(restoring.tensors)
        restoring.apply(saved.read)
        wait_for_devices(restoring.tensors)

    in_all(run.host, apply, stops=True)
    return Restored(step=saved.facts.step, seed=saved.facts.seed, extra=states)
