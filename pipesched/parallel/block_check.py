"""Block check: refuses code between divided layers that gives other numbers on a rank's block than on the whole.

Many functions have results of fitting shapes on a block of the columns, and wrong numbers: a norm over all columns, a
chunk of columns that should have been divided by sections, a scale that is computed from a size. So a pipeline runs
the model on its sample twice: whole, before its layers are divided, and then as this rank runs it, without exchanging
anything. In the second run, the divided layers return this rank's blocks of what they returned in the first. Each of
them must then get its block of the input of the first run.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipesched.devices.generators import default_generator
from pipesched.errors import InputError, PipeschedError
from pipesched.model.state_guard import set_aside, untouched
from pipesched.parallel.attention import HeadsAttention
from pipesched.parallel.axis_groups import AxisGroups
from pipesched.parallel.cross_entropy import VocabularyCrossEntropy
from pipesched.parallel.embedding import GatheredEmbedding, VocabularyEmbedding
from pipesched.parallel.grid_layers import BlockedEmbedding, BlockedHeads, BlockedLinear, BlockedNorm, JoinsBlocks
from pipesched.parallel.layer_styles import Column, LayerStyle
from pipesched.parallel.linear import ColumnLinear, RowLinear
from pipesched.parallel.norms import JoinsSequence
from pipesched.parallel.split_module import held_by, is_split
from pipesched.parallel.tensor_group import ActivationLayout, Division, TensorGroup
from pipesched.parallel.weight_split import SplitWeights, WeightSplit
from pipesched.tensors.meta_tensors import lacks_contents
from pipesched.tensors.payload import pytree

__all__ = ["BlockCheck"]

_WHOLE, _DIVIDED = ActivationLayout.WHOLE, ActivationLayout.DIVIDED
_SEQUENCE = ActivationLayout.SEQUENCE

#: The largest relative difference that rounding may cause, for floating-point numbers of 4 or 8 bytes and of fewer.
_ROUNDING = {True: 1e-3, False: 3e-2}
_STYLES = (
    "in tensor_parallel=, give a layer whose columns have several parts Column(sections=...), give the module whose "
    "attributes count heads Heads('num_heads'), or leave the layers around this code out"
)
_JOINS = f"the code before it joins columns of several ranks, or computes with their number; {_STYLES}"
_MIXES = (
    "the code before it joins positions of several ranks; give the style 'sequence-end' to a module before this code, "
    "or leave sequence=True out"
)


_Sample = tuple[tuple[Any, ...], dict[str, Any]]


class _Call(NamedTuple):
    """The first argument of a layer and its output in a call of the whole layer, on the CPU."""

    given: Any
    returned: Any


@dataclass(frozen=True, kw_only=True)
class BlockCheck:
    """The calls of layers in a run of the whole model, with which the split model is compared.

    Attributes:
        model: the user's module.
        names: the layers that are compared, with their names.
        calls: the calls of each of them, in order.
        output: the output of the model.

    """

    model: nn.Module
    names: Mapping[nn.Module, str]
    calls: Mapping[nn.Module, list[_Call]]
    output: Any

    @classmethod
    def of_whole(cls, model: nn.Module, styles: Mapping[str, LayerStyle], sample: _Sample) -> "BlockCheck | None":
        """Run the whole model on a sample, as in an evaluation. Not collective.

        Returns None if the run shows nothing: the model has no contents, draws random numbers, or raises an error. The
        runs that follow report the errors of a model.

        Args:
            model: the user's module, whose layers are still whole.
            styles: the styles of the layers that will be divided.
            sample: the arguments of a micro-batch.

        """
        if lacks_contents(model):
            return None
        modules = dict(model.named_modules(remove_duplicate=False))
        names = {modules[name]: name for name in reversed([*styles]) if name in modules}
        columns = {layer for layer, name in names.items() if isinstance(styles[name], Column)}
        names |= {part: name for name, part in modules.items() if isinstance(part, VocabularyCrossEntropy)}
        states = _random_states(model)
        try:
            with _evaluated(model):
                calls: dict[nn.Module, list[_Call]] = {layer: [] for layer in names}

                def note(layer: nn.Module, args: Any, output: Any) -> Any:
                    if layer in columns:
                        output = pytree.tree_map_only(Tensor, _uneven, output)
                    calls[layer].append(_Call(_kept(args[0]) if args else None, _kept(output)))
                    return output

                with _hooked(names, after=note):
                    output = _kept(_run(model, sample))
                if any(not torch.equal(one.get_state(), state) for one, state in states.items()):
                    return None
        except Exception:  # any error of a model's code
            return None
        return cls(model=model, names=names, calls=calls, output=output)

    def compare(self, split: SplitWeights, group: TensorGroup, sample: _Sample, *, takes_logits: bool) -> None:
        """Run the split model on the same sample. Not collective.

        Args:
            split: how the weights are divided.
            group: the tensor group.
            sample: the arguments of a micro-batch.
            takes_logits: whether a loss takes divided outputs of the model.

        Raises:
            InputError: a layer gets other numbers than its block of the input of the whole layer, code between layers
                does not run on blocks, or the output of the model is divided and no loss takes it so.

        """
        blocks = _Blocks(group=group, split=split, names=self.names)
        group.layout = _WHOLE
        left = {layer: iter(calls) for layer, calls in self.calls.items()}
        try:
            with group.alone(), _evaluated(self.model):
                present: dict[nn.Module, _Call] = {}

                def before(layer: nn.Module, args: Any) -> None:
                    present[layer] = next(left[layer])
                    blocks.check_input(layer, args, present[layer].given)

                def after(layer: nn.Module, args: Any, output: Any) -> Any:
                    return blocks.output(layer, output, present[layer].returned)

                with _hooked(self.names, before=before, after=after):
                    output = _run(self.model, sample)
        except PipeschedError:
            raise
        except Exception as error:  # any error of a model's code
            if blocks.begun:
                raise blocks.failed(error) from error
            return  # the runs that follow report it
        finally:
            group.layout = _WHOLE
        blocks.check_output(output, self.output, takes_logits=takes_logits)


@dataclass(frozen=True, kw_only=True)
class _Blocks:
    """The blocks of activations that this rank has."""

    group: TensorGroup
    split: SplitWeights
    names: Mapping[nn.Module, str]
    #: The names of the layers that have divided columns since activations were whole.
    begun: list[str] = field(default_factory=list)

    def check_input(self, layer: nn.Module, args: Any, given: Any) -> None:
        """Raise InputError if a divided layer gets another tensor than its block of the whole input."""
        layout = _input_layout(layer)
        if layout is None or not args or not isinstance(args[0], Tensor):
            return
        own, due = args[0], self._own(given, layout)
        name = self.names[layer]
        place = f"the input of {name!r}{self._after}"
        if own.shape != due.shape:
            raise InputError(
                f"a layer that tensor_parallel= divides must get its block of the whole input; {place} has the shape "
                f"{list(own.shape)} on rank {self.group.rank} of {self.group.size}, and the block {list(due.shape)}; "
                f"{_MIXES if layout is _SEQUENCE else _JOINS}"
            )
        self._compare(own, due, place, _MIXES if layout is _SEQUENCE else _JOINS)

    def output(self, layer: nn.Module, output: Any, whole: Any) -> Any:
        """Return what a layer returns to this rank, given what the whole layer returned."""
        layout = self._output_layout(layer)
        if layout is None:
            return output
        if layout in (_WHOLE, _SEQUENCE, ActivationLayout.OUTER):
            self.begun.clear()
        else:
            self.begun.append(self.names[layer])
        if isinstance(whole, tuple):  # attention: the output, and weights of all heads
            return (self._like(whole[0], layout, layer, output[0]), *whole[1:])
        return self._like(whole, layout, layer, output)

    def check_output(self, output: Any, whole: Any, *, takes_logits: bool) -> None:
        """Raise InputError if an output of the model differs from that of the whole model."""
        leaves = zip(pytree.tree_leaves(output), pytree.tree_leaves(whole), strict=False)
        for own, due in leaves:
            if not isinstance(own, Tensor) or not isinstance(due, Tensor):
                continue
            if own.shape == due.shape:
                self._compare(own, due, f"an output of the model{self._after}", _JOINS)
            elif not takes_logits:
                raise InputError(
                    f"the outputs of a model must be whole, unless VocabularyCrossEntropy takes them; an output"
                    f"{self._after} has the shape {list(own.shape)} on each rank, and {list(due.shape)} as a whole; "
                    f"give the last layer the style 'column-gathered', or pass a loss that is a module with "
                    f"pipesched.parallel.VocabularyCrossEntropy in an attribute"
                )

    def failed(self, error: Exception) -> InputError:
        """Return the error for code that runs on whole activations, and not on a rank's block."""
        return InputError(
            f"code between layers that tensor_parallel= divides must run on a rank's block of the activations; on rank "
            f"{self.group.rank} of {self.group.size}, the code{self._after} raised {type(error).__name__}: {error}; "
            f"{_STYLES}"
        )

    @property
    def _after(self) -> str:
        return f", after {' and '.join(map(repr, self.begun[-3:]))}," if self.begun else ""

    def _compare(self, own: Tensor, due: Tensor, place: str, remedy: str) -> None:
        if not own.is_floating_point():
            return
        precise = own.dtype.itemsize >= 4
        one, other = own.detach().double().cpu(), due.double()
        if not bool(other.isfinite().all()):
            return
        distance = float((one - other).norm() / torch.maximum(one.norm(), other.norm()).clamp(min=1e-30))
        if not distance <= _ROUNDING[precise]:
            raise InputError(
                f"code between layers that tensor_parallel= divides must give each rank its block of what it gives "
                f"for whole activations; {place} differs by {distance:.1%} from this block on rank {self.group.rank} "
                f"of {self.group.size}; {remedy}"
            )

    def _like(self, whole: Any, layout: ActivationLayout, layer: nn.Module, output: Any) -> Any:
        """Return the block of a whole tensor, on the device and in the dtype of the output of this rank."""
        if not isinstance(whole, Tensor) or not isinstance(output, Tensor):
            return output
        return self._own(whole, layout, self._sections(layer)).to(output)

    def _sections(self, layer: nn.Module) -> tuple[int, ...]:
        name = f"{self.names[layer]}.weight" if self.names[layer] else "weight"
        split: Any = self.split[name] if name in self.split else WeightSplit(dim=0)
        sections: tuple[int, ...] = split.sections
        return sections

    def _own(self, whole: Tensor, layout: ActivationLayout, sections: tuple[int, ...] = ()) -> Tensor:
        last = whole.dim() - 1
        for dim, place, parts in self._divisions(layout, last):
            split = WeightSplit(dim=dim, sections=sections if dim == last else ())
            whole = split.own(whole, place, parts)
        return whole

    def _divisions(self, layout: ActivationLayout, last: int) -> list[Division]:
        group = self.group
        if layout is _WHOLE:
            return []
        if isinstance(group.grid, AxisGroups):
            return group.grid.divisions(layout, last)
        return [Division(group.sequence_dim if layout is _SEQUENCE else last, group.rank, group.size)]

    def _output_layout(self, layer: nn.Module) -> ActivationLayout | None:
        """Return the layout of what a layer has just returned; None if the layer itself computes it from its input."""
        if isinstance(layer, BlockedNorm):
            return ActivationLayout.OUTER
        if isinstance(layer, _RETURN):
            return self.group.layout
        keeps_columns = isinstance(layer, nn.Embedding) and is_split(layer) and self.group.grid is None
        return _DIVIDED if keeps_columns else None


#: The forms of layers whose outputs the second run takes from the first.
_RETURN = (
    *(ColumnLinear, RowLinear, VocabularyEmbedding, GatheredEmbedding, HeadsAttention, VocabularyCrossEntropy),
    *(JoinsSequence, BlockedLinear, BlockedNorm, BlockedEmbedding, JoinsBlocks),
    *(nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
)


def _input_layout(layer: nn.Module) -> ActivationLayout | None:
    """Return the layout of the first argument of a divided layer; None if it is not compared."""
    if isinstance(layer, RowLinear):
        return None if held_by(layer).options["whole_input"] else _DIVIDED
    if isinstance(layer, BlockedLinear):
        return layer.layouts[0]
    if isinstance(layer, BlockedNorm | BlockedHeads):
        return ActivationLayout.OUTER
    if isinstance(layer, ColumnLinear | HeadsAttention):
        return _SEQUENCE if held_by(layer).options["sequence"] else _WHOLE
    return _SEQUENCE if isinstance(layer, JoinsSequence) else None


@contextmanager
def _evaluated(model: nn.Module) -> Iterator[None]:
    """Run the model as in an evaluation in the ``with`` block, and restore its state."""
    with set_aside(model), untouched(model, False), torch.no_grad():
        yield


@contextmanager
def _hooked(layers: Iterable[nn.Module], *, before: Any = None, after: Any) -> Iterator[None]:
    """Call ``before`` and ``after`` at each call of the layers in the ``with`` block."""
    handles = [layer.register_forward_hook(after) for layer in layers]
    if before is not None:
        handles += [layer.register_forward_pre_hook(before) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _random_states(model: nn.Module) -> dict[torch.Generator, Tensor]:
    """Return the states of the generators from which the model may draw."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    generators = {torch.default_generator, *map(default_generator, devices)}
    return {generator: generator.get_state() for generator in generators}


def _run(model: nn.Module, sample: _Sample) -> Any:
    args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), sample)
    return model(*args, **kwargs)


def _kept(value: Any) -> Any:
    """Return a copy of the tensors of a value on the CPU."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().cpu().clone(), value)


def _uneven(output: Tensor) -> Tensor:
    """Return an output whose columns differ more, so that a function that joins them shows."""
    if not output.is_floating_point() or not output.dim():
        return output
    ramp = torch.linspace(-1, 1, output.shape[-1], device=output.device).to(output.dtype)
    return output * (1.25 + 0.75 * ramp) + ramp * output.abs().mean()
