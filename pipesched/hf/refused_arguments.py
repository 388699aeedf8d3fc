"""Refused arguments: the TrainingArguments that a trainer's pipeline cannot honour, each with a remedy."""

from transformers import TrainerCallback, TrainingArguments

from pipesched.checks import shown
from pipesched.errors import InputError
from pipesched.hf.arguments import PipelineArguments

__all__ = ["REFUSED", "REFUSED_OPTIMIZERS", "check_arguments", "check_callbacks"]

#: Name -> why the argument is refused, and what to do instead.
REFUSED = {
    "fp16": ("half precision needs a scaler that sees all stages", "pass bf16=True"),
    "fp16_full_eval": ("evaluation uses the weights of training", "pass bf16=True"),
    "bf16_full_eval": ("evaluation uses the weights of training", "pass bf16=True"),
    "fsdp": ("the pipeline shards the weights itself", "pass pipeline_zero=3"),
    "deepspeed": ("the pipeline shards the weights itself", "pass pipeline_zero=1, 2 or 3"),
    "parallelism_config": ("the pipeline places the weights itself", "pass pipeline_parallel_size="),
    "auto_find_batch_size": ("a plan is made for one size of batch", "pass pipeline_memory_limit="),
    "activation_checkpointing": ("the pipeline recomputes activations itself", "pass pipeline_checkpoint='always'"),
    "gradient_checkpointing": ("the pipeline recomputes activations itself", "pass pipeline_checkpoint='always'"),
    "use_liger_kernel": ("it replaces the forward of whole models", "apply its layers to the model yourself"),
    "torch_empty_cache_steps": ("stages free their memory during a step", "pass pipeline_memory_limit="),
    "push_to_hub": ("checkpoints hold the files of all ranks", "upload the folder of save_model() after training"),
    "debug": ("it hooks into the forward of whole models", "leave it out"),
    "save_on_each_node": ("each rank writes its own part of a checkpoint", "use a folder that all ranks share"),
    "eval_use_gather_object": ("only tensors are gathered over replicas", "return tensors, or use one replica"),
    "ddp_find_unused_parameters": ("the pipeline replaces DistributedDataParallel", "leave it out"),
    "ddp_bucket_cap_mb": ("the pipeline replaces DistributedDataParallel", "leave it out"),
    "ddp_broadcast_buffers": ("the pipeline replaces DistributedDataParallel", "leave it out"),
    "ddp_static_graph": ("the pipeline replaces DistributedDataParallel", "leave it out"),
}

#: Start of a value of ``optim`` -> why it is refused. These optimizers need the parameters of the whole model in one.
REFUSED_OPTIMIZERS = {
    "galore": "it chooses weights by the layers of the whole model",
    "apollo": "its random numbers depend on the place of each weight in the whole model",
    "grokadamw": "its decay depends on the place of each weight in the whole model",
    "lomo": "it updates the weights during the backward of each micro-batch",
    "adalomo": "it updates the weights during the backward of each micro-batch",
}


def check_arguments(args: TrainingArguments, pipeline: PipelineArguments) -> None:
    """Raise InputError for an argument that the pipeline cannot honour."""
    for name, (why, remedy) in REFUSED.items():
        if value := getattr(args, name, None):
            raise InputError(
                f"PipelineTrainer cannot honour every TrainingArgument, and raises an error for those; got "
                f"{name}={shown(value)}; {why}; {remedy}"
            )
    optimizer = str(getattr(args.optim, "value", args.optim))
    for start, why in REFUSED_OPTIMIZERS.items():
        if optimizer.startswith(start):
            raise InputError(
                f"each stage of a pipeline updates its own weights; got optim={optimizer!r}; {why}; pass "
                f"optim='adafactor', which needs little memory, or optim='adamw_torch'"
            )
    if args.accelerator_config.split_batches or args.accelerator_config.dispatch_batches:
        raise InputError(
            f"each replica of a pipeline reads its own batches; got accelerator_config with "
            f"split_batches={args.accelerator_config.split_batches} and "
            f"dispatch_batches={args.accelerator_config.dispatch_batches}; leave both out"
        )
    is_distributed = args.world_size > 1
    if is_distributed and args.enable_jit_checkpoint:
        raise InputError(
            f"the ranks of a pipeline save a checkpoint together, but enable_jit_checkpoint saves once a signal "
            f"reaches one; got enable_jit_checkpoint=True and {args.world_size} processes; leave it out, and pass "
            f"save_steps"
        )
    if is_distributed and pipeline.pipeline_devices is not None:
        raise InputError(
            f"with several processes each process is one rank on its own device; got "
            f"pipeline_devices={shown(pipeline.pipeline_devices)} and {args.world_size} processes; leave "
            f"pipeline_devices out, or start one process"
        )
    for name in ("pipeline_parallel_size", "pipeline_tensor_size"):
        if not is_distributed and (getattr(pipeline, name) or 1) > 1:
            raise InputError(
                f"{name} counts processes; got {name}={getattr(pipeline, name)} in one process; pass "
                f"pipeline_devices, or start the script with torchrun"
            )
    if pipeline.pipeline_tensor_size > 1 and getattr(args, "predict_with_generate", False):
        raise InputError(
            f"text is generated with whole layers, but between two evaluations each process holds blocks of them; got "
            f"predict_with_generate=True and pipeline_tensor_size={pipeline.pipeline_tensor_size}; pass "
            f"pipeline_tensor_size=1, or generate text after training, with pipeline.gather_model()"
        )


def check_callbacks(callbacks: list[TrainerCallback], pipeline: PipelineArguments) -> None:
    """Raise InputError for a callback that reads gradients, if the pipeline's step has used them before."""
    for callback in callbacks if pipeline.pipeline_zero else ():
        if type(callback).on_pre_optimizer_step is not TrainerCallback.on_pre_optimizer_step:
            raise InputError(
                f"with pipeline_zero above 0, a step updates the weights and clears the gradients before "
                f"on_pre_optimizer_step is called; got pipeline_zero={pipeline.pipeline_zero} and a callback "
                f"{type(callback).__name__} with this method; pass pipeline_zero=0, or leave the callback out"
            )
