"""Restoring: loads a saved run into a running pipeline, after checking that the whole saved run fits."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pipesched.checks import is_count, shown
from pipesched.errors import CheckpointError
from pipesched.progress import advance
from pipesched.saving.chunks import Rows
from pipesched.saving.extra_states import ExtraChanges, as_extra
from pipesched.saving.live_run import LiveRun
from pipesched.saving.optimizer_states import GivenOptimizers, OptimizerChanges, as_optimizers
from pipesched.saving.rollback import Rollback, noted
from pipesched.saving.saved_run import Read, SavedRun
from pipesched.saving.scheduler_states import SchedulerChanges, as_schedulers
from pipesched.saving.split_states import OwnBlocks
from pipesched.saving.state_encoding import decoded, tensor_keys
from pipesched.saving.tensor_files import dtype_name
from pipesched.tensors.exchange import copy_into
from pipesched.units import counted
from pipesched.user_warning import warn

__all__ = ["Restored", "Restoring"]

_REMEDIES = {
    "num_microbatches": "pass num_microbatches={}",
    "loss": "pass the same loss_fn",
    "loss_reduction": "pass numerics=Numerics(loss_reduction={!r})",
    "batch_norm": "pass numerics=Numerics(batch_norm={!r})",
    "intra_op_threads": "pass numerics=Numerics(intra_op_threads={})",
}


#: The settings that only change how sums are rounded.
_ROUNDING = ("num_replicas", "num_shards", "num_planes", "reduction_order")


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The result of loading a checkpoint.

    Attributes:
        step: the number of steps that the saved run had completed.
        seed: the seed of the saved run's random numbers.
        extra: the saved values of ``extra``, keyed by name. The value saved for an object is the object's state.

    """

    step: int
    seed: int
    extra: Mapping[str, Any] = field(default_factory=dict)


class Restoring:
    """Loads a saved run into a running one. The constructor checks that the saved run fits, and ``apply`` loads it.

    Args:
        saved: the saved run.
        run: the run into which the saved run is loaded.
        optimizer: the argument ``optimizer`` of load.
        scheduler: the argument ``scheduler`` of load.
        extra: the argument ``extra`` of load.
        following: the names in ``extra`` of objects that get the tensors of this process's stages, whatever tensors
            they have now. Default: none.

    Raises:
        CheckpointError: the saved run does not fit; the error names the setting, tensor, optimizer or object.

    """

    def __init__(
        self,
        saved: SavedRun,
        run: LiveRun,
        optimizer: GivenOptimizers | None,
        scheduler: Any,
        extra: Mapping[str, Any] | None,
        following: Collection[str] = (),
    ) -> None:
        self._saved = saved
        self._run = run
        self._check_settings()
        self._tensors = {**self._tensors_of("parameter"), **self._tensors_of("buffer")}
        self._modules = self._module_states()
        optimizers = as_optimizers(optimizer, run)
        schedulers = as_schedulers(scheduler, run)
        self._check_present("scaler", "scaler", run.scaler is not None)
        self._check_present("groups", "optimizer", bool(optimizers))
        self._check_present("schedulers", "scheduler", bool(schedulers))
        self._optimizers = OptimizerChanges(saved, optimizers, run) if optimizers else None
        self._schedulers = SchedulerChanges(saved, schedulers) if schedulers else None
        self._extra = ExtraChanges(saved, as_extra(extra), run, following)
        self._check_scaler()
        keys = {*self._tensors, *self._extra.keys}
        keys |= {key for _, value in self._modules for key in tensor_keys(value)}
        keys |= self._schedulers.keys if self._schedulers else set()
        #: Key of each tensor that this process reads -> the rows to read (None: all rows).
        self.needed: dict[str, Rows | None] = dict.fromkeys(keys)
        self.needed |= {
            key: held.rows for key in self._tensors if (held := run.divided_weights.get(saved.entries[key].name))
        }
        self.needed |= self._optimizers.needed if self._optimizers else {}
        unknown = next((key for key in self.needed if key not in saved.entries), None)
        if unknown is not None:
            raise CheckpointError(
                f"a checkpoint must hold every tensor that its values refer to; {saved.where} lacks {shown(unknown)}; "
                f"save the checkpoint again"
            )
        #: The parts of these tensors that this process holds.
        self._blocks = OwnBlocks(saved, run, self.needed)
        self.needed = {key: self._blocks.needed(key, rows) for key, rows in self.needed.items()}

    def _check_scaler(self) -> None:
        """Raise CheckpointError if the saved state of the scaler has an entry of another type."""
        own = {} if self._run.scaler is None else self._run.scaler.state_dict()
        saved = self._saved.values.get("scaler", {})
        for name, value in own.items():
            if type(value) in (int, float) and type(saved.get(name, value)) not in (int, float):
                raise CheckpointError(
                    f"the state of the scaler must be saved with its types; in {self._saved.where}, {name} is "
                    f"{shown(saved[name])}; save the checkpoint again"
                )

    def _check_settings(self) -> None:
        saved = self._saved.facts.settings
        for name in ("num_microbatches", "num_replicas", "num_shards", "num_planes"):
            if not is_count(saved.get(name, 1)):
                raise CheckpointError(
                    f"the settings of a saved run must be those that pipesched saved; in {self._saved.where}, {name} "
                    f"is {shown(saved[name])}; load another checkpoint"
                )
        for name, own in self._run.facts.settings.items():
            if name in saved and saved[name] != own and name not in _ROUNDING:
                remedy = _REMEDIES.get(name, f"pass the same {name}").format(saved[name])
                place = ""
                if name == "num_microbatches" and self._replicas != (1, 1):
                    remedy, place = self._remedy_of_microbatches(saved[name]), " of all replicas"
                raise CheckpointError(
                    f"a run can continue only with its original settings; {name}{place} is {saved[name]!r} in "
                    f"{self._saved.where}, but {own!r} in this pipeline; {remedy} to Pipeline, or load only the "
                    f"weights with load_state_dict"
                )

    @property
    def _replicas(self) -> tuple[int, int]:
        """The number of replicas in the saved run, and in this run."""
        return self._both("num_replicas")

    def _both(self, name: str) -> tuple[int, int]:
        """Return the values of a setting in the saved run and in this run; 1 for a run without this setting."""
        return self._saved.facts.settings.get(name, 1), self._run.facts.settings.get(name, 1)

    def _remedy_of_microbatches(self, total: int) -> str:
        saved, own = self._replicas
        if total % own == 0:
            return f"pass num_microbatches={total // own}, the number per replica,"
        return f"pass a mesh of {saved} replicas and num_microbatches={total // saved}"

    def _tensors_of(self, kind: str) -> dict[str, Tensor]:
        """Return the tensors of one kind that this process loads, keyed as in the checkpoint.

        Raises CheckpointError if names, shapes or dtypes differ from the saved ones.
        """
        run = self._run
        buffers = {**run.buffers, **run.shared_buffers}
        own: Mapping[str, Tensor] = run.parameters if kind == "parameter" else buffers
        all_names = {name for name in run.shapes if (name in run.parameter_names) == (kind == "parameter")}
        stored = {entry.name: key for key, entry in self._saved.entries.items() if entry.kind == kind}
        missing = [name for name in all_names if name not in stored]
        foreign = [name for name in stored if name not in all_names]
        if missing or foreign:
            lists = [f"only in the model: {_some(missing)}"] * bool(missing)
            lists += [f"only in the checkpoint: {_some(foreign)}"] * bool(foreign)
            made = "; if forwards register these buffers, call model(sample) once before you build the pipeline"
            raise CheckpointError(
                f"a checkpoint must have exactly the model's {kind}s; {self._saved.where} differs from the model "
                f"({'; '.join(lists)}); build the model that was saved{made * (kind == 'buffer' and not missing)}"
            )
        here = {name: tensor for name, tensor in own.items() if run.is_here(name)}
        for name, tensor in here.items():
            entry = self._saved.entries[stored[name]]
            shape = run.whole_shape(name)
            if entry.dtype != dtype_name(tensor.dtype) or (entry.shape != shape and name not in run.caches):
                raise CheckpointError(
                    f"a checkpoint must have the model's shapes and dtypes; {kind} {name!r} is {entry.dtype} of shape "
                    f"{list(entry.shape)} in {self._saved.where}, but {dtype_name(tensor.dtype)} of shape "
                    f"{list(shape)} in the model; build the model that was saved"
                )
        return {stored[name]: tensor for name, tensor in here.items()}

    def _module_states(self) -> list[tuple[Any, Any]]:
        states: Mapping[str, Any] = self._saved.values.get("modules", {})
        for name in self._run.modules:
            if name not in states:
                raise CheckpointError(
                    f"a checkpoint must have the state of every module with get_extra_state; {self._saved.where} has "
                    f"no such state for {repr(name) if name else 'the model'}; build the model that was saved"
                )
        return [(module, states[name]) for name, module in self._run.modules.items()]

    def _check_present(self, word: str, what: str, wanted: bool) -> None:
        if wanted and word not in self._saved.values:
            raise CheckpointError(
                f"a checkpoint must contain the state that {what}= loads; {self._saved.where} was saved without "
                f"{what}=; leave out {what}=, or save a checkpoint with {what}="
            )

    @property
    def left(self) -> list[str]:
        """Descriptions of the saved states for which no argument was passed to load."""
        left = []
        given = self._optimizers is not None or self._run.optimizers is not None
        if not given and "groups" in self._saved.values and self._saved.values.get("parameters"):
            count = counted(len(self._saved.values["parameters"]), "parameter")
            left.append(f"the optimizer states of {count} (optimizer=)")
        if "schedulers" in self._saved.values and self._schedulers is None:
            left.append("the states of the schedulers (scheduler=)")
        if "scaler" in self._saved.values and self._run.scaler is None:
            left.append("the state of the scaler (Numerics(scaler=))")
        return left + [f"the state of {name!r} (extra=)" for name in self._extra.left]

    def warn(self) -> None:
        """Warn about saved states for which no argument was passed, and about changed settings that affect rounding."""
        saved, own = self._replicas
        shards = self._both("num_shards")
        planes = self._both("num_planes")
        orders = [one.facts.settings.get("reduction_order", "sequential") for one in (self._saved, self._run)]
        if orders[0] != orders[1]:
            warn(
                f"the order in which gradients are added affects rounding; {self._saved.where} was saved with "
                f"reduction_order={orders[0]!r}, and this pipeline has {orders[1]!r}; the run continues, but differs "
                f"in rounding; for identical bits pass Numerics(reduction_order={orders[0]!r}), or else ignore this "
                f"warning"
            )
        elif saved != own and orders[0] == "sequential":
            warn(
                f"the number of replicas affects rounding, because gradients are added within each replica and then "
                f"across replicas; {self._saved.where} was saved with {saved} replica{'s' * (saved > 1)}, and this "
                f"pipeline has {own}; the run continues with the same micro-batches and random numbers, but differs in "
                f"rounding; for identical bits use a mesh of {saved} replica{'s' * (saved > 1)}, or else ignore this "
                f"warning"
            )
        elif shards[0] != shards[1]:
            warn(
                f"with zero=2 and 3, the norm for clipping is computed from norms of each replica's rows, which "
                f"affects rounding; {self._saved.where} was saved with gradients in {counted(shards[0], 'part')}, and "
                f"this pipeline has {counted(shards[1], 'part')}; the run continues, but differs in rounding; for "
                f"identical bits pass {'Distributed(zero=2)' if shards[0] > 1 else 'zero=0 or zero=1'}, or else ignore "
                f"this warning"
            )
        if planes[0] != planes[1]:
            warn(
                f"the number of ranks that split the layers affects rounding, because each adds up its own part of a "
                f"sum; {self._saved.where} was saved with {counted(planes[0], 'tensor rank')}, and this pipeline has "
                f"{planes[1]}; the run continues with the same micro-batches and random numbers, but differs in "
                f"rounding; for identical bits use a mesh with {counted(planes[0], 'tensor rank')}, or else ignore "
                f"this warning"
            )
        if self.left:
            warn(
                f"resuming a run requires all saved states; {self._saved.where} also holds {', '.join(self.left)}; "
                f"pass the arguments in parentheses, unless you need only the weights"
            )

    @property
    def tensors(self) -> list[Tensor]:
        """The weights and buffers that ``apply`` changes."""
        return list(self._tensors.values())

    def extra_states(self, read: Read) -> dict[str, Any]:
        """Return the saved states of the objects in ``extra``, and the other saved extra values, keyed by name."""
        return self._extra.states(self._blocks.reading(read))

    def load_objects(self, states: Mapping[str, Any], rollback: Rollback) -> None:
        """Load the states into the objects in ``extra``. This calls the user's code, which can raise any error."""
        self._extra.apply(states, rollback)

    def load_states(self, read: Read, rollback: Rollback) -> None:
        """Load module states, the scaler, the options of optimizers, and schedulers. This calls the user's code."""
        for module, value in self._modules:
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                rollback.then(copy_into, tensor, tensor.detach().clone())  # set_extra_state may write to them
            rollback.remember(module.get_extra_state, module.set_extra_state)
            with noted(f"a module of class {type(module).__qualname__}"):
                module.set_extra_state(decoded(value, read))
            rollback.check()
            advance()
        if self._run.scaler is not None:
            rollback.remember(self._run.scaler.state_dict, self._run.scaler.load_state_dict)
            with noted("the scaler"):
                self._run.scaler.load_state_dict(dict(self._saved.values["scaler"]))
        if self._optimizers is not None:
            self._optimizers.apply_options(rollback)
        if self._schedulers is not None:
            self._schedulers.apply(read, rollback)
        rollback.check()

    def _check_goes_on(self) -> None:
        """Raise CheckpointError if the pipeline has failed, so that load has raised an error in the main thread."""
        if self._run.host.executor.closed:
            raise CheckpointError("a load must not go on after the pipeline has failed")

    def apply(self, read: Read) -> None:
        """Load weights, buffers and the states of optimizers. Clears gradients.

        Everything that can fail has been checked before, except that a file can change or become unreadable meanwhile.
        """
        read = self._blocks.reading(read)
        for key, tensor in self._tensors.items():
            copy_into(tensor, read(key, self.needed[key]))
            self._check_goes_on()
        for parameter in self._run.parameters.values():
            parameter.grad = None
        if self._optimizers is not None:
            self._optimizers.apply_states(read)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, sorted(names)[:3])) + more
