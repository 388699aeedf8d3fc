"""Saving interface: the methods of a pipeline that save and load checkpoints and weights."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any

from torch import nn

from pipesched.checks import as_path
from pipesched.errors import CheckpointError
from pipesched.parallel.weight_split import SplitWeights
from pipesched.pipeline.gathering import named_tensors
from pipesched.pipeline.module_interface import ModuleInterface
from pipesched.pipeline.options import Numerics
from pipesched.pipeline.running_plan import RunningPlan
from pipesched.planning.plan import Plan
from pipesched.runtime.stage.divided_weights import DividedWeights
from pipesched.saving.chunks import Rows
from pipesched.saving.exported_weights import export_weights
from pipesched.saving.live_run import DividedWeight, Facts, LiveRun
from pipesched.saving.names import own_names
from pipesched.saving.optimizer_states import GivenOptimizers
from pipesched.saving.restoring import Restored
from pipesched.saving.saver import Saver
from pipesched.saving.split_states import whole_weights

__all__ = ["SavingInterface"]


class SavingInterface(ModuleInterface):
    """The methods of a pipeline that save and load checkpoints and weights."""

    _running: RunningPlan
    _numerics: Numerics

    def __init__(self, model: nn.Module, loss_fn: Callable[[Any, Any], Any] | None) -> None:
        super().__init__(model, loss_fn)
        self._saver = Saver()
        self._described: tuple[object, dict[str, Any]] | None = None

    def save(
        self,
        path: str | PathLike[str],
        *,
        optimizer: GivenOptimizers | None = None,
        scheduler: Any = None,
        extra: Mapping[str, Any] | None = None,
        asynchronous: bool = False,
        keep: int | None = None,
    ) -> None:
        """Save the run. A run resumed under any plan gives results bit-identical to those of a run that never stopped.

        ::

            pipe.save("checkpoint", optimizer=optimizer, scheduler=scheduler)
            pipe.save("checkpoints", optimizer=optimizer, keep=3)  # checkpoints/step-00000100, ...

        A checkpoint holds parameters, buffers, optimizer states, the number of steps, the seed and the plan, in
        safetensors and JSON files with hashes. Gradients are not saved, so save between ``optimizer.step()`` and the
        next ``step()``. A checkpoint that is already at ``path`` stays usable until the new one is complete, even if
        the save is killed or the disk is full. Under a mesh, every rank must call this method. Each rank writes its own
        stages to a file system that all ranks share. With several replicas, every rank of every replica must call this
        method; the ranks of replica 0 write. With ``zero=`` above 0, all ranks write. If layers are split over ranks
        (``tensor_parallel=``), the ranks of each tensor group gather whole tensors, and the first of each group writes.

        Args:
            path: the folder of the checkpoint. With ``keep``, the folder that contains the checkpoints' folders.
            optimizer: the optimizer of ``pipe.parameters()``, or a list or dict of optimizers. Default: None. A
                pipeline with ``optimizer=`` saves its own optimizers.
            scheduler: a learning rate scheduler, a list of schedulers, or a dict of schedulers keyed by stage.
                Default: None.
            extra: a dict from names to objects with ``state_dict()``, or to values: plain types, tensors and numpy
                numbers. States and values must be identical on all ranks. Default: None.
            asynchronous: copy the tensors to host memory and return while a thread writes the files. The next ``save``,
                ``load`` or ``close`` waits for the thread and raises its error. Default: False.
            keep: the number of checkpoints to keep in ``path``. Default: None (``path`` itself is the only checkpoint).

        Raises:
            InputError: an argument is wrong.
            CheckpointError: a value cannot be saved, a value differs between replicas, or writing failed. Every rank
                raises this error.

        """
        with self._whole_weights("save"):
            self._saver.save(
                self._whole_run(), path, (optimizer, scheduler, extra), asynchronous=bool(asynchronous), keep=keep
            )

    def load(
        self,
        path: str | PathLike[str],
        *,
        optimizer: GivenOptimizers | None = None,
        scheduler: Any = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Restored:
        """Load a checkpoint and continue the saved run, even under another plan or with another number of ranks.

        ::

            pipe = Pipeline(model, sample, loss_fn=loss_fn, devices=devices)
            optimizer = torch.optim.AdamW(pipe.parameters())
            restored = pipe.load("checkpoint", optimizer=optimizer)
            for step in range(restored.step, 1000):
                ...

        Weights, buffers and optimizer states are loaded by name. The number of steps and the seed are set to the
        saved values, and gradients are cleared. If any part of the checkpoint does not fit, nothing changes. Under a
        mesh, every rank must call this method; each rank reads only the files that it needs. The number of replicas can
        change if the total number of micro-batches in all replicas stays the same. The resumed run then differs in
        rounding, and a warning says so, unless both runs use ``Numerics(reduction_order="tree")``. ``zero=`` can also
        change, and so can the number of ranks that split layers, which affects rounding, too.

        Args:
            path: the folder of a checkpoint, or a folder with several checkpoints (see ``keep`` of ``save``). Of
                several checkpoints, ``load`` uses the newest undamaged one.
            optimizer: the optimizer of ``pipe.parameters()``, or a list or dict of optimizers. It must be of the
                same class as the saved optimizer. Each group gets the options that were saved for its parameters.
            scheduler: a learning rate scheduler, a list of schedulers, or a dict of schedulers keyed by stage.
            extra: a dict of objects with ``load_state_dict()``, keyed by name.

        Returns:
            The step, the seed, and the saved values of ``extra``.

        Raises:
            MissingCheckpointError: there is no file and no checkpoint. The error is also a FileNotFoundError.
            DamagedCheckpointError: a file is missing or has changed.
            CheckpointError: the checkpoint does not fit the pipeline (the error names the tensor or the setting), or
                the path holds something else, such as a file of weights for `load_state_dict`.
            InputError: a step is running.

        """
        return self._loaded(lambda run: self._saver.load(run, path, (optimizer, scheduler, extra)))

    def training_state(
        self,
        *,
        optimizer: GivenOptimizers | None = None,
        scheduler: Any = None,
        extra: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the contents of a checkpoint, for you to write to a file yourself. Collective under a mesh.

        ::

            torch.save(pipe.training_state(optimizer=optimizer), f"rank-{rank}.pt")

        Args:
            optimizer: as for ``save``.
            scheduler: as for ``save``.
            extra: as for ``save``.

        Returns:
            A dict of plain values and tensors that ``torch.load`` can read with ``weights_only=True``. Under a mesh, it
            holds this rank's part of the checkpoint. With several replicas, only the ranks of replica 0 get tensors;
            with ``zero=`` above 0, all ranks do. Of the ranks of a tensor group, only the first gets tensors. The
            tensors share memory with the pipeline, so copy them before the next step.

        Raises:
            CheckpointError: a value cannot be saved.

        """
        with self._whole_weights("training_state"):
            return self._saver.training_state(self._whole_run(), (optimizer, scheduler, extra))

    def load_training_state(
        self,
        state: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        optimizer: GivenOptimizers | None = None,
        scheduler: Any = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Restored:
        """Load the result of ``training_state``, and continue the saved run under any plan. Collective under a mesh.

        Args:
            state: the dict that ``training_state`` returned, or a list of the dicts of all ranks.
            optimizer: as for ``load``.
            scheduler: as for ``load``.
            extra: as for ``load``.

        Returns:
            The step, the seed, and the saved values of ``extra``.

        Raises:
            CheckpointError: the state does not fit the pipeline.
            InputError: a step is running.

        """
        return self._loaded(lambda run: self._saver.load_training_state(run, state, (optimizer, scheduler, extra)))

    def save_weights(self, folder: str | PathLike[str]) -> None:
        """Write the model's weights for other programs, in the format of Hugging Face's ``save_pretrained``.

        Collective under a mesh.

        ::

            pipe.save_weights("gpt")
            model = AutoModelForCausalLM.from_pretrained("gpt")
            pipe = Pipeline(build, sample, init="gpt", devices=devices)

        Each process writes its own weights to a safetensors file such as ``model-00001-of-00002.safetensors``; with
        several replicas, only the processes of replica 0 write. The first process also writes the index and, if the
        model has one, its configuration. The names are the keys of the model's ``state_dict``. Tied weights are
        written once, and the weights of a loss module are left out. Weights that the folder already contains are
        replaced.

        Args:
            folder: the folder, on a file system that all ranks share.

        Raises:
            CheckpointError: writing failed.

        """
        with self._whole_weights("save_weights"):
            run = self._whole_run()
            weights = {**run.parameters, **run.buffers}
            own = {name: weights[name] for name in weights if name not in run.caches and run.replica == 0}
            if len(self._roots) > 1:
                own = {name: tensor for name, tensor in own.items() if not name.startswith("loss_fn.")}
            export_weights(as_path(folder), own, self.model, run.host, run.process, whole_weights(own, run))

    def _loaded(self, load: Callable[[LiveRun], Restored]) -> Restored:
        self._guard.check(changes=False)
        self._check_idle("load")
        with self._whole_weights("load"), self._changing_state():
            restored = load(self._whole_run())
        self._guard.check(changes=True)
        self._running.step = restored.step
        self._running.seed = restored.seed
        self._copy_state()
        return restored

    def _copy_state(self) -> None:
        """Copy the state of all ranks, if they keep copies."""

    def _changing_state(self) -> AbstractContextManager[None]:
        """A context for a call that changes weights or states."""
        return nullcontext()

    def _whole_run(self) -> LiveRun:
        """Return the state of this pipeline for a checkpoint, which holds whole tensors. Finishes steps first."""
        run = self._live_run()
        split = self._running.assembly.split
        if split is None:
            return run
        named = self.model.named_parameters(remove_duplicate=False)
        splits = {run.names[id(parameter)]: split[name] for name, parameter in named if name in split}
        return replace(run, split=SplitWeights(split.group, splits))

    def _live_run(self) -> LiveRun:
        """Return the state of this process, with its blocks of divided weights. Finishes the steps under way first."""
        running = self._running
        running.host.executor.check_outside("save or load")
        self._guard.use()
        roots = self._modules()
        own_name = own_names(roots)
        tensors = dict(named_tensors(roots))
        parameters = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter)}
        buffers = {name: tensor for name, tensor in tensors.items() if name not in parameters}
        own = {name for name in tensors if self._is_own(name)}
        if len(set(map(own_name, tensors))) < len(tensors):
            names = list(map(own_name, tensors))
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(
                "the names of a model's tensors must stay unique when the prefixes of wrapper modules are removed; two "
                f"of {len(names)} names become {twice!r}; rename a module"
            )
        modules = dict(pair for prefix, root in roots.items() for pair in root.named_modules(prefix=prefix[:-1]))
        used = {
            id(buffer)
            for stage in running.assembly.stages.values()
            for module in stage.modules.values()
            for buffer in module.buffers()
        }
        caches = [
            own_name(f"{name}.{key}" if name else key)
            for name, module in modules.items()
            for key in module._non_persistent_buffers_set
        ]
        with_state = {
            name: module
            for name, module in modules.items()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }
        weights_of = {parameter: weights for weights in running.assembly.divided_weights for parameter in weights}
        divided = {
            name: (parameter, weights_of[parameter])
            for name, parameter in parameters.items()
            if parameter in weights_of
        }
        return LiveRun(
            host=running.host,
            facts=self._facts(),
            parameters={own_name(name): parameter for name, parameter in parameters.items() if name in own},
            buffers={own_name(name): buffer for name, buffer in buffers.items() if name in own},
            shared_buffers={
                own_name(name): buffer for name, buffer in buffers.items() if name not in own and id(buffer) in used
            },
            shapes={own_name(name): tuple(tensor.shape) for name, tensor in tensors.items()}
            | {own_name(name): weights.shape(parameter) for name, (parameter, weights) in divided.items()},
            parameter_names=set(map(own_name, parameters)),
            caches=caches,
            names={id(parameter): own_name(name) for name, parameter in parameters.items()},
            modules={
                own_name(name): module
                for name, module in with_state.items()
                if self._is_own(f"{name}._extra_state" if name else "_extra_state")
            },
            optimizers=running.assembly.optimizers if running.updates else None,
            divided=running.assembly.divided_updates,
            zero=running.assembly.zero,
            divided_weights={
                own_name(name): _share(parameter, weights) for name, (parameter, weights) in divided.items()
            },
            scaler=self._numerics.enabled_scaler,
        )

    def _facts(self) -> Facts:
        running = self._running
        assembly = running.assembly
        if self._described is None or self._described[0] is not assembly:
            programs = assembly.programs
            plan = Plan(
                stages=assembly.cut,
                schedule=running.program.name,
                program=running.program,
                checkpoint=programs.checkpoint,
                options=programs.options,
                completion=programs.completion,
            )
            self._described = assembly, plan.to_dict()
        num_replicas = len(running.host.grid.rows)
        settings = {
            "num_microbatches": assembly.programs.num_microbatches * num_replicas,  # of all replicas together
            "num_replicas": num_replicas,
            "loss": described_loss(self.loss_fn),
            "loss_reduction": running.splitter.loss_reduction,
            "batch_norm": self._numerics.batch_norm,
            "intra_op_threads": self._numerics.intra_op_threads,
        }
        if self._numerics.reduction_order == "tree":
            settings["reduction_order"] = "tree"
        if assembly.zero >= 2 and self._numerics.clip_grad_norm is not None:
            settings["num_shards"] = num_replicas  # clipping computes the gradient norm from this many norms
        if assembly.split is not None:
            settings["num_planes"] = assembly.split.group.size
        return Facts(step=running.step, seed=running.seed, settings=settings, plan=self._described[1])


def _share(parameter: nn.Parameter, weights: DividedWeights) -> DividedWeight:
    """Return what this process holds of a parameter that the replicas divide."""
    rows = weights.own_rows(parameter)
    return DividedWeight(rows=None if rows is None else Rows(*rows), is_here=parameter.numel() > 0)


def described_loss(loss_fn: Any) -> str | None:
    """Return the name of a loss function, with the options of a torch.nn loss or a functools.partial."""
    if loss_fn is None:
        return None
    if isinstance(loss_fn, partial):
        options = [repr(value) for value in loss_fn.args] + _options(loss_fn.keywords)
        return f"{described_loss(loss_fn.func)}({', '.join(options)})"
    if isinstance(loss_fn, nn.Module):
        kind = type(loss_fn)
        own = vars(loss_fn) if kind.__module__.startswith("torch.nn.") else {}
        return f"{kind.__qualname__}({', '.join(_options(own))})"
    return getattr(loss_fn, "__qualname__", type(loss_fn).__qualname__)


def _options(values: Mapping[str, Any]) -> list[str]:
    plain = {name: value for name, value in values.items() if not name.startswith("_") and name != "training"}
    return [f"{name}={value!r}" for name, value in sorted(plain.items()) if isinstance(value, bool | int | float | str)]
