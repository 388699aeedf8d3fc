"""Trainer: Hugging Face's Trainer with a Pipeline's step as its training step."""

import json
import math
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from transformers import Seq2SeqTrainer, Trainer, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pipesched.errors import ExecutionError, InputError
from pipesched.hf.arguments import PipelineArguments
from pipesched.hf.batches import cut, joined
from pipesched.hf.refused_arguments import check_arguments, check_callbacks
from pipesched.hf.replicas import DataReplicas
from pipesched.hf.run_files import RunFiles, random_state, random_states, set_random_states, weights_in
from pipesched.hf.stage_optimizers import StageOptimizers
from pipesched.hf.trainer_loss import StepLossRule, TrainerLoss
from pipesched.hf.whole_checkpoints import begin_save, check_whole, newest_whole
from pipesched.pipeline.options import Distributed, Numerics, Search
from pipesched.pipeline.pipeline import Pipeline
from pipesched.runtime.microbatches import Microbatch
from pipesched.runtime.stage.elementwise import is_elementwise
from pipesched.user_warning import warn

__all__ = ["PipelineSeq2SeqTrainer", "PipelineTrainer"]


class _PipelineTraining(Trainer):
    """The methods of Trainer that a pipeline changes."""

    optimizer: Any
    current_flos: float
    gather_function: Any
    _pipeline: Pipeline | None = None
    _rule: StepLossRule
    _num_weights: int
    _parts: int  #: the number of micro-batches of a batch in training
    _evaluation_parts: int
    _splits: bool  #: whether the losses of a batch's parts give its loss
    _resume_from: Path | None = None

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *,
        pipeline: PipelineArguments | None = None,
        **kwargs: Any,
    ) -> None:
        self.pipeline_args = pipeline or PipelineArguments()
        args = args or TrainingArguments(output_dir="tmp_trainer")
        if type(self).compute_loss is not _PipelineTraining.compute_loss:
            raise InputError(
                f"the last stage of a pipeline computes the loss of each micro-batch, so the loss must not be a method "
                f"of the Trainer; {type(self).__name__} has its own compute_loss; pass compute_loss_func= instead"
            )
        args._n_gpu = min(args.n_gpu, 1)  # one process drives all devices as one pipeline, not as replicas
        self._microbatches: list[Microbatch] = []
        self._needs_outputs = True
        super().__init__(model, args, **kwargs)
        if self.pipeline_args.pipeline_zero and self.optimizer is not None:
            raise InputError(
                f"with pipeline_zero above 0, the pipeline makes the optimizers of its stages; got "
                f"pipeline_zero={self.pipeline_args.pipeline_zero} and optimizers=; pass optimizer_cls_and_kwargs= "
                f"instead"
            )

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline. Raises ExecutionError before training or evaluation starts, because that makes the pipeline."""
        if self._pipeline is None:
            raise ExecutionError(
                "a trainer makes its pipeline when training or evaluation starts, from its first batch; the pipeline "
                "was read before; call train() or evaluate() first"
            )
        return self._pipeline

    def create_accelerator_and_postprocess(self) -> None:
        """Let all ranks of a pipeline read the same batches. Each trial of a hyperparameter search starts here, too."""
        check_arguments(self.args, self.pipeline_args)
        super().create_accelerator_and_postprocess()
        sizes = self.pipeline_args.pipeline_parallel_size, self.pipeline_args.pipeline_tensor_size
        self.replicas = DataReplicas(*sizes, self.args.device.type)
        if self.replicas.mesh is not None:
            self.accelerator.prepare_data_loader = partial(self.replicas.prepare, self.accelerator)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Let a sampler that divides the rows among processes divide them among replicas."""
        sampler = super()._get_train_sampler(train_dataset)
        if not hasattr(sampler, "dp_size"):
            return sampler
        replicas, accumulation = self.replicas, self.args.gradient_accumulation_steps
        return type(sampler)(
            lengths=sampler.lengths,
            effective_batch_size=self.args.train_batch_size * accumulation * replicas.count,
            dp_size=replicas.count,
            grad_accum=accumulation,
            rank=replicas.index,
            drop_last=sampler.drop_last,
        )

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Return the number of labels. Undo a division by `get_tp_size` where no sum over processes went before."""
        count = super()._get_num_items_in_batch(batch_samples, device)
        is_of_one = isinstance(count, Tensor) and not self.args.average_tokens_across_devices
        return count * self.get_tp_size() if is_of_one else count

    # ---- the pipeline -----------------------------------------------------------------------------------------------

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is: the pipeline moves each stage to its device."""

    def call_model_init(self, trial: Any = None) -> Any:
        if self._pipeline is not None:
            self._pipeline.close()
            self._pipeline = None
        return super().call_model_init(trial)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        if self._pipeline is None:  # a subclass has its own create_optimizer
            self._make_pipeline_for_training()
        return self.pipeline

    def get_tp_size(self) -> int:
        """Return the number of processes that read the same batches. Trainer divides its counts by this number."""
        return self.replicas.num_alike

    def create_optimizer(self, model: Any = None) -> Any:
        """Make the pipeline, then an optimizer of the weights that this process trains."""
        if model is not None:
            return super().create_optimizer(model)
        self._make_pipeline_for_training()
        if self.pipeline_args.pipeline_zero:
            self.optimizer = StageOptimizers(self.pipeline, self.args.learning_rate)
        elif self.optimizer is None:
            self.optimizer = self._optimizer_of(list(self.pipeline.named_parameters()))
        if not self.pipeline_args.pipeline_zero:
            self._check_elementwise(self.optimizer)
        return self.optimizer

    def _check_elementwise(self, optimizer: Any) -> None:
        """Raise InputError if an optimizer combines elements of a weight that processes divide."""
        if self.replicas.tensor_size > 1 and not is_elementwise(getattr(optimizer, "optimizer", optimizer)):
            raise InputError(
                f"with pipeline_tensor_size above 1, each process updates its own block of a weight, so an optimizer "
                f"must update each element independently of the others; got "
                f"pipeline_tensor_size={self.replicas.tensor_size} and {type(optimizer).__name__}; pass "
                f"optim='adamw_torch', or pipeline_tensor_size=1"
            )

    def _make_pipeline_for_training(self) -> None:
        with random_state():
            self._make_pipeline(next(iter(self.get_train_dataloader())))
        check_callbacks(self.callback_handler.callbacks, self.pipeline_args)

    def get_decay_parameter_names(self, model: Any) -> Any:
        return super().get_decay_parameter_names(self.model)

    def _optimizer_of(self, named: list[tuple[str, nn.Parameter]]) -> Any:
        """Make an optimizer of some of the model's parameters, as Trainer makes one of all parameters."""
        self.optimizer = None
        made = super().create_optimizer(_Named(named, self.model))
        self.optimizer = None
        return made

    def _optimizer_of_stage(self, parameters: Any) -> Any:
        made = self._optimizer_of(parameters.named())
        if hasattr(made, "eval"):
            raise InputError(
                f"with pipeline_zero above 0, a replica holds only a part of each weight between steps, so an "
                f"optimizer cannot change the weights for an evaluation; got "
                f"pipeline_zero={self.pipeline_args.pipeline_zero} and {type(made).__name__}; pass pipeline_zero=0"
            )
        return made

    def _make_pipeline(self, batch: dict[str, Any]) -> None:
        """Make the pipeline, unless it exists. The first micro-batch of the first replica's ``batch`` is the sample."""
        if self._pipeline is not None:
            return
        options, replicas = self.pipeline_args, self.replicas
        batch = replicas.of_first(dict(batch))
        for module in self.model.modules():  # Trainer sets the model's own configuration, not those of its parts
            if hasattr(getattr(module, "config", None), "use_cache"):
                module.config.use_cache = self.args.use_cache
        devices = None if replicas.mesh is not None else options.pipeline_devices or _devices(self.args.device)
        num_ranks = replicas.pipeline_size if devices is None else len(devices)
        accumulation = self.args.gradient_accumulation_steps
        files = RunFiles(self._resume_from) if self._resume_from else None
        saved = files.num_microbatches(replicas.count) if files and files.exist else None
        self._parts = options.microbatches_per_batch(accumulation, num_ranks, saved)
        loss = TrainerLoss(smoother=self.label_smoother, shifts=self._shifts(), function=self.compute_loss_func)
        sample = self._find_rule(batch, loss)
        self._evaluation_parts = 2 * num_ranks if self._splits and not self.compute_loss_func else self._parts
        self._num_weights = self._counted_weights()
        clip = self.args.max_grad_norm or math.inf
        zero = options.pipeline_zero
        plan = options.plan
        with self._autocast():
            self._pipeline = Pipeline(
                self.model,
                sample,
                devices=devices,
                mesh=replicas.mesh,
                loss_fn=loss,
                schedule="auto" if plan is not None else options.pipeline_schedule,
                num_microbatches=None if plan is not None else self._parts * accumulation,
                checkpoint=options.pipeline_checkpoint,
                optimizer=self._optimizer_of_stage if zero else None,
                seed=self.args.seed,
                compile=self._compile(),
                plan=plan,
                search=Search(memory_limit_bytes=options.pipeline_memory_limit),
                numerics=Numerics(loss_reduction="sum", clip_grad_norm=clip if zero else None),
                distributed=Distributed(zero=zero, tensor_parallel="auto" if replicas.tensor_size > 1 else None),
            )

    def _find_rule(self, batch: dict[str, Any], loss: TrainerLoss) -> dict[str, Any]:
        """Find how the losses of micro-batches add up. Returns the sample of the pipeline.

        Raises InputError if batches must be split, but their losses do not add up.
        """
        count = self._get_num_items_in_batch([batch], self.args.device)
        weights = next(self.model.parameters(), None)  # the pipeline has not moved them yet
        if weights is not None:
            batch, count = send_to_device((batch, count), weights.device)
        sample = cut(batch, self._parts)[0]
        if loss.takes_labels:
            sample.pop("labels", None)
        if self.model_accepts_loss_kwargs and count is not None:
            sample["num_items_in_batch"] = count
        self._rule = StepLossRule.of(self.model, loss, sample, takes_count=self.model_accepts_loss_kwargs)
        self._splits = self._rule.splits(self.model, batch, count)
        if self._parts > 1:
            self._check_splits()
        elif self._rule.unknown:
            self._splits = False
        return sample

    def _check_splits(self) -> None:
        """Raise InputError if the losses of a batch's parts do not give its loss, and warn if that is not known."""
        name, accumulation = type(self.model).__name__, self.args.gradient_accumulation_steps
        remedy = (
            f"pass pipeline_microbatches={accumulation}, which equals gradient_accumulation_steps and splits no batch"
        )
        if not self._splits:
            raise InputError(
                f"each batch is split into micro-batches, so its loss must be a sum, or a mean over rows or labels; "
                f"the loss of {name} for some rows differs from that of their halves together; {remedy}"
            )
        if self._rule.unknown:
            warn(
                f"each batch is split into micro-batches, weighted by their rows, because it could not be determined "
                f"over which labels {name} averages its loss: {self._rule.unknown}; {remedy}; if the loss is a mean "
                f"over rows, ignore this warning"
            )

    def _shifts(self) -> bool:
        """Return whether the model is a language model that compares each label with the output one place before."""
        model: Any = self.model.base_model.model if hasattr(self.model, "peft_config") else self.model
        return type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()

    def _compile(self) -> Any:
        if not self.args.torch_compile:
            return False
        options = {"backend": self.args.torch_compile_backend, "mode": self.args.torch_compile_mode}
        return {name: value for name, value in options.items() if value is not None} or True

    def _autocast(self) -> Any:
        return torch.autocast(self.args.device.type, torch.bfloat16) if self.args.bf16 else nullcontext()

    # ---- training ---------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as Trainer does. With ``resume_from_checkpoint=True``, the newest complete checkpoint is the start."""
        self._microbatches = []  # those of a step that a callback has stopped
        if resume_from_checkpoint is True:
            whole, lacks = newest_whole(Path(self.args.output_dir))
            if lacks and self.is_world_process_zero():
                warn(f"training resumes from {whole}, because newer checkpoints are incomplete: {'; '.join(lacks)}")
            resume_from_checkpoint = True if whole is None else str(whole)
        elif resume_from_checkpoint:
            check_whole(Path(resume_from_checkpoint))
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Keep the batch; with the last batch of a step, run the pipeline's step. Returns the loss of the step then.

        If data without a length end within a step, the next step has their last batches, too, as with Trainer.
        """
        has_sum = self.loss_is_scaled_for_ga
        if has_sum is None:
            has_sum = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            has_sum = has_sum or self.compute_loss_func is not None
        factor = self._replica_factor(num_items_in_batch) / (1 if has_sum else self.current_gradient_accumulation_steps)
        batch = dict(self._prepare_inputs(inputs))
        self._microbatches += self._rule.microbatches([batch], self._parts, num_items_in_batch, factor)
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        microbatches, self._microbatches = self._microbatches, []
        if hasattr(self.optimizer, "train") and callable(self.optimizer.train):
            self.optimizer.train()
        self.pipeline.train()
        with self._autocast():
            loss = self.pipeline.step(microbatches=microbatches)
        return loss.to(self.args.device)

    def _replica_factor(self, count: Any) -> float:
        """Return the factor of a replica's loss in the mean over replicas, as Trainer computes it."""
        divides = self.model_accepts_loss_kwargs or self.compute_loss_func
        is_of_all = self.args.average_tokens_across_devices and divides and count is not None
        return 1.0 if is_of_all else 1 / self.replicas.count

    def _clip_grad_norm(self, model: Any) -> Any:
        return self._get_grad_norm(model, max_norm=self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None, max_norm: float = math.inf) -> Any:
        if grad_norm is not None:
            return grad_norm
        return self.pipeline.grad_norm if self.pipeline_args.pipeline_zero else self.pipeline.clip_grad_norm_(max_norm)

    def floating_point_ops(self, inputs: dict[str, Any]) -> Any:
        """Count the operations of all weights, also if this process holds only a part of them."""
        count = super().floating_point_ops(inputs)
        held = self._counted_weights()
        return count * self._num_weights // held if held else count

    def _counted_weights(self) -> int:
        """Return the number of weights in this process that Trainer counts, or 0 if it counts none."""
        count = getattr(self.model, "num_parameters", None)
        return 0 if count is None else int(count(exclude_embeddings=True))

    def store_flos(self) -> None:
        """Count each batch once, not in every rank of its pipeline."""
        self.current_flos = 0.0 if self.replicas.rank else float(self.current_flos)
        super().store_flos()

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        seen = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        self.state.num_input_tokens_seen = seen + (self.state.num_input_tokens_seen - seen) // self.get_tp_size()

    # ---- evaluation -------------------------------------------------------------------------------------------------

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        if self._pipeline is None:
            with random_state():
                self._make_pipeline(next(iter(dataloader)))
        if self.replicas.mesh is not None:  # a Seq2SeqTrainer keeps the rows that the last batch has twice
            keeps = self.gather_function == self.accelerator.gather
            self.gather_function = partial(self.replicas.gather, self.accelerator, keeps_duplicates=keeps)
        if getattr(self.args, "predict_with_generate", False):
            self.pipeline.gather_model()
        return super().evaluation_loop(dataloader, *args, **kwargs)

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> Any:
        self._needs_outputs = not prediction_loss_only
        with self._autocast():
            return super().prediction_step(self._outputs, inputs, prediction_loss_only, *args, **kwargs)

    def _outputs(self, **inputs: Any) -> Any:
        """Return the outputs of a batch of this replica, with the mean loss if there are labels."""
        if inputs.get("labels") is None:
            return self.pipeline(gather=True, **inputs)
        labels = inputs["labels"][..., 1:] if self._shifts() else inputs["labels"]
        count = labels.ne(-100).sum() if self._rule.takes_count else None
        loss, outputs = self._evaluated(inputs, count, 1.0)
        return {"loss": loss, **outputs}  # metrics get it as Trainer's, if the labels have none of the label_names

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss of a batch of this replica, and its outputs if asked for."""
        factor = self._replica_factor(num_items_in_batch) * self.replicas.count
        loss, outputs = self._evaluated(inputs, num_items_in_batch, factor)
        return (loss, outputs) if return_outputs else loss

    def _evaluated(self, inputs: dict[str, Any], count: Any, factor: float) -> tuple[Tensor, dict[str, Any]]:
        _, outputs = self.pipeline.evaluate(
            microbatches=self._rule.microbatches([inputs], self._evaluation_parts, count, factor),
            return_outputs=True,
            gather=self._needs_outputs,
            metrics=partial(_loss_of_replica, self._rule.loss, self.replicas.index, self.replicas.count),
        )
        loss = self.pipeline.metrics[f"loss of replica {self.replicas.index}"].to(self.args.device)
        return loss, joined(outputs, self.args.device) if self._needs_outputs else {}

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write the weights as ``save_pretrained`` does, the tokenizer, and the arguments as JSON."""
        folder = Path(output_dir or self.args.output_dir)
        if self._pipeline is None or hasattr(self.model, "peft_config"):
            state = self.model.state_dict() if self._pipeline is None else self.pipeline.full_state_dict()
            if self.args.should_save:
                self.model.save_pretrained(folder, state_dict=state)
        else:
            self.pipeline.save_weights(folder)
        if not self.args.should_save:
            return
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        (folder / "training_args.json").write_text(json.dumps(self.args.to_dict(), indent=2, default=str))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the run, so that it can resume on any plan."""
        states = self.replicas.gathered(random_states())
        if self.args.should_save:
            begin_save(Path(output_dir), removes_others=bool(self.args.save_total_limit))
        self.pipeline.save(RunFiles(Path(output_dir)).path, **self._run_state(), extra={"random": states})

    def _save_rng_state(self, output_dir: str) -> None:
        """Do nothing: the pipeline's checkpoint has these states."""

    _save_scaler = _save_rng_state

    def _run_state(self) -> dict[str, Any]:
        optimizer = None if self.pipeline_args.pipeline_zero else getattr(self.optimizer, "optimizer", self.optimizer)
        return {"optimizer": optimizer, "scheduler": self.lr_scheduler}

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Note from which folder the run resumes. A folder with weights only is loaded at once."""
        self._resume_from = Path(resume_from_checkpoint)
        if not RunFiles(self._resume_from).exist:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        files = RunFiles(Path(checkpoint)) if checkpoint else None
        if files is not None and files.exist:
            self._random_states = self.pipeline.load(files.path, **self._run_state()).extra["random"]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint and RunFiles(Path(checkpoint)).exist:
            set_random_states(self._random_states[self.replicas.index % len(self._random_states)])

    def _load_best_model(self) -> None:
        names = [name for name, _ in self.model.named_parameters()]
        best = weights_in(Path(self.state.best_model_checkpoint), names)
        self.pipeline.load_state_dict(best, strict=False)


def _loss_of_replica(loss: TrainerLoss, own: int, count: int, outputs: Any, target: Any) -> dict[str, Any]:
    """Return the loss of each replica. Each replica knows its own, and the sum over replicas has all."""
    value = loss(outputs, target)
    return {f"loss of replica {index}": value * (index == own) for index in range(count)}


def _devices(own: torch.device) -> list[Any]:
    """Return the devices of a process: all accelerators of the kind of its own device, or one CPU."""
    if own.type == "cpu":
        return ["cpu"]
    return [torch.device(own.type, index) for index in range(torch.accelerator.device_count())]


class _Named:
    """Some of the model's parameters, in place of the model, for Trainer's method that makes an optimizer."""

    def __init__(self, named: list[tuple[str, nn.Parameter]], model: nn.Module) -> None:
        self._named = named
        self.modules = model.modules

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._named


class PipelineTrainer(_PipelineTraining):
    """Hugging Face's Trainer, whose training step is a step of a Pipeline.

    ::

        pipeline = PipelineArguments(pipeline_devices=["cuda:0", "cuda:1"])
        trainer = PipelineTrainer(model=model, args=args, pipeline=pipeline, train_dataset=dataset)
        trainer.train()

    Losses, gradient norms, metrics and learning rates are those that Trainer prints, up to rounding. In one process,
    the stages run on the devices of ``pipeline_devices``. Under torchrun, each process is one rank of a pipeline, and
    ``pipeline_parallel_size`` processes form a pipeline; if there are more, each pipeline is a replica that reads its
    own part of the data. With ``pipeline_tensor_size``, several processes split each layer. A checkpoint can be resumed
    on any plan and any number of ranks.

    Args:
        model: the model, as for Trainer.
        args: the TrainingArguments. Those that a pipeline cannot honour raise an InputError that names them.
        pipeline: the options of the pipeline. Default: ``PipelineArguments()``.
        **kwargs: all other arguments of Trainer.

    Raises:
        InputError: an argument cannot be honoured, or the class has its own ``compute_loss``.

    """


class PipelineSeq2SeqTrainer(_PipelineTraining, Seq2SeqTrainer):
    """Hugging Face's Seq2SeqTrainer, whose training step is a step of a Pipeline; see `PipelineTrainer`.

    With ``predict_with_generate``, each process gathers the whole model before an evaluation, to generate text with it.
    """
