"""Hugging Face: trainers whose training step is a step of a Pipeline. Needs ``pip install 'pipesched[hf]'``."""

from pipesched.hf.arguments import PipelineArguments
from pipesched.hf.trainer import PipelineSeq2SeqTrainer, PipelineTrainer

__all__ = ["PipelineArguments", "PipelineSeq2SeqTrainer", "PipelineTrainer"]
