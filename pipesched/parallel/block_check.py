"""Block check: refuses code between divided layers that gives other numbers on a rank's block than on the whole.

Many functions have results of fitting shapes on a block of the columns, and wrong numbers: a norm over all columns, a
chunk of columns that should have been divided by sections, a scale that is computed from a size. So a pipeline runs
the model on its sample twice: whole, before its layers are divided, and then as this rank runs it, without exchanging
anything. In the first run, each layer whose output will be divided returns made-up numbers; in the second, this rank's
block of them. The layer that takes the result must then get its block of what it got in the first.

Only the code between these layers computes: everything else runs on the meta device. If the model's code needs its
values, all of it computes.
"""

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipesched.devices.generators import default_generators
from pipesched.errors import InputError, PipeschedError
from pipesched.parallel.attention import HeadsAttention
from pipesched.parallel.cross_entropy import VocabularyCrossEntropy
from pipesched.parallel.embedding import GatheredEmbedding, VocabularyEmbedding
from pipesched.parallel.grid_layers import BlockedEmbedding, BlockedHeads, BlockedLinear, BlockedNorm, JoinsBlocks
from pipesched.parallel.known_values import Sample, evaluated, run_model
from pipesched.parallel.layer_styles import Column, DividedVocabulary, Heads, LayerStyle, SequencePart
from pipesched.parallel.linear import ColumnLinear, RowLinear
from pipesched.parallel.norms import DividesSequence, JoinsSequence
from pipesched.parallel.split_module import held_by, is_split
from pipesched.parallel.tensor_group import ActivationLayout, TensorGroup
from pipesched.parallel.weight_split import SplitWeights, WeightSplit
from pipesched.tensors.meta_tensors import lacks_contents
from pipesched.tensors.payload import pytree
from pipesched.tensors.tree_structure import tensors_in

__all__ = ["BlockCheck"]

_NUMBER = re.compile(r"\d+")
_MOST_VALUES = 1 << 27  # that the layers of a model return; then one layer of each kind returns values

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


class _WholeCall(NamedTuple):
    """The first argument of a layer and its output in a call of the whole layer, on the CPU."""

    given: Any
    returned: Any


@dataclass(frozen=True, kw_only=True)
class BlockCheck:
    """The calls of layers in a run of the whole model, with which the split model is compared.

    Attributes:
        model: the user's module.
        on_meta: whether only the code between divided layers computes.
        names: the layers that are compared, with their names.
        calls: the calls of each of them, in order.
        output: the output of the model.

    """

    model: nn.Module
    on_meta: bool
    names: Mapping[nn.Module, str]
    calls: Mapping[nn.Module, list[_WholeCall]]
    output: Any

    @classmethod
    def of_whole(cls, model: nn.Module, styles: Mapping[str, LayerStyle], sample: Sample) -> "BlockCheck | None":
        """Run the whole model on a sample, as in an evaluation. Not collective.

        Returns None if the run shows nothing: the model draws random numbers, or raises an error. The runs that follow
        report the errors of a model.

        Args:
            model: the user's module, whose layers are still whole.
            styles: the styles of the layers that will be divided.
            sample: the arguments of a micro-batch.

        """
        modules = dict(model.named_modules(remove_duplicate=False))
        names = {modules[name]: name for name in reversed([*styles]) if name in modules}
        divided = {layer for layer, name in names.items() if _divides(styles[name], layer)}
        names |= {part: name for name, part in modules.items() if isinstance(part, VocabularyCrossEntropy)}
        check = cls._of_run(model, names, divided, sample, on_meta=True)
        if check is None and not lacks_contents(model):
            check = cls._of_run(model, names, divided, sample, on_meta=False)
        return check

    @classmethod
    def _of_run(
        cls,
        model: nn.Module,
        names: Mapping[nn.Module, str],
        divided: Container[nn.Module],
        sample: Sample,
        *,
        on_meta: bool,
    ) -> "BlockCheck | None":
        states = _random_states(model)
        try:
            with evaluated(model, on_meta=on_meta) as values:
                calls: dict[nn.Module, list[_WholeCall]] = {layer: [] for layer in names}
                given: dict[nn.Module, Any] = {}
                room = _Room(model)

                def before(layer: nn.Module, args: Any) -> Any:
                    given[layer] = values.of(args[0]) if args else None
                    return values.put_away(args)

                def after(layer: nn.Module, args: Any, output: Any) -> Any:
                    if layer in divided and room.has(names[layer], output):
                        output = pytree.tree_map_only(Tensor, values.make_up, output)
                    calls[layer].append(_WholeCall(given[layer], pytree.tree_map_only(Tensor, values.of, output)))
                    return output

                with _hooked(names, before, after):
                    output = pytree.tree_map_only(Tensor, values.shown, run_model(model, sample, on_meta=on_meta))
                drew = any(not torch.equal(one.get_state(), state) for one, state in states.items())
        except Exception:  # any error of a model's code
            return None
        return None if drew else cls(model=model, on_meta=on_meta, names=names, calls=calls, output=output)

    def compare(self, split: SplitWeights, group: TensorGroup, sample: Sample, *, takes_logits: bool) -> None:
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
            with group.alone(), evaluated(self.model, on_meta=self.on_meta) as values:
                present: dict[nn.Module, _WholeCall] = {}

                def before(layer: nn.Module, args: Any) -> Any:
                    present[layer] = next(left[layer])
                    if args and present[layer].given is not None:
                        blocks.check_input(layer, values.of(args[0]), present[layer].given)
                    return values.put_away(args)

                def after(layer: nn.Module, args: Any, output: Any) -> Any:
                    return pytree.tree_map_only(
                        Tensor, values.keep, blocks.output(layer, output, present[layer].returned)
                    )

                with _hooked(self.names, before, after):
                    output = pytree.tree_map_only(
                        Tensor, values.shown, run_model(self.model, sample, on_meta=self.on_meta)
                    )
        except InputError:
            raise
        except PipeschedError:
            return  # code that needs values of the weights
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

    def check_input(self, layer: nn.Module, own: Tensor | None, given: Tensor) -> None:
        """Raise InputError if a divided layer gets another tensor than its block of the whole input."""
        layout = _input_layout(layer)
        if layout is None or own is None:
            return
        due = self._own(given, layout)
        place = f"the input of {self.names[layer]!r}{self._after}"
        remedy = _MIXES if layout is _SEQUENCE else _JOINS
        if own.shape != due.shape:
            raise InputError(
                f"a layer that tensor_parallel= divides must get its block of the whole input; {place} has the shape "
                f"{list(own.shape)} on rank {self.group.rank} of {self.group.size}, and the block {list(due.shape)}; "
                f"{remedy}"
            )
        self._compare(own, due, place, remedy)

    def output(self, layer: nn.Module, output: Any, whole: Any) -> Any:
        """Return this rank's block of the whole layer's output, or the layer's own output if that has no values."""
        layout = self._output_layout(layer)
        if layout is None:
            return output
        if layout in (_WHOLE, _SEQUENCE, ActivationLayout.OUTER):
            self.begun.clear()
        else:
            self.begun.append(self.names[layer])
        if isinstance(whole, tuple):  # attention: the output, and weights of all heads
            others = [own if one is None else one for one, own in zip(whole[1:], output[1:], strict=True)]
            return (self._like(whole[0], layout, layer, output[0]), *others)
        return self._like(whole, layout, layer, output)

    def check_output(self, output: Any, whole: Any, *, takes_logits: bool) -> None:
        """Raise InputError if an output of the model differs from that of the whole model."""
        leaves = zip(pytree.tree_leaves(output), pytree.tree_leaves(whole), strict=False)
        for own, due in leaves:
            if not isinstance(own, Tensor) or not isinstance(due, Tensor):
                continue
            if own.shape == due.shape:
                self._compare(own, due, f"an output of the model{self._after}", _JOINS)
            elif own.shape[:-1] == due.shape[:-1] and not takes_logits:  # other outputs, such as keys, have heads
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
        if own.is_meta or due.is_meta or not own.is_floating_point():
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
        block = self._own(whole, layout, self._sections(layer))
        return block if output.is_meta else block.to(output)

    def _sections(self, layer: nn.Module) -> tuple[int, ...]:
        name = f"{self.names[layer]}.weight" if self.names[layer] else "weight"
        split: Any = self.split[name] if name in self.split else WeightSplit(dim=0)
        sections: tuple[int, ...] = split.sections
        return sections

    def _own(self, whole: Tensor, layout: ActivationLayout, sections: tuple[int, ...] = ()) -> Tensor:
        last = whole.dim() - 1
        for dim, place, parts in self.group.divisions_at(layout, last):
            split = WeightSplit(dim=dim, sections=sections if dim == last else ())
            whole = split.own(whole, place, parts)
        return whole

    def _output_layout(self, layer: nn.Module) -> ActivationLayout | None:
        """Return the layout of a layer's output; None if the output is not taken from the whole layer."""
        if isinstance(layer, BlockedNorm):
            return ActivationLayout.OUTER
        if isinstance(layer, _RETURN):
            return self.group.layout
        keeps_columns = isinstance(layer, nn.Embedding) and is_split(layer) and self.group.grid is None
        return _DIVIDED if keeps_columns else None


#: The forms of layers whose outputs the second run takes from the first.
_RETURN = (
    *(ColumnLinear, RowLinear, VocabularyEmbedding, GatheredEmbedding, HeadsAttention, VocabularyCrossEntropy),
    *(DividesSequence, JoinsSequence, BlockedLinear, BlockedNorm, BlockedEmbedding, JoinsBlocks),
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


def _divides(style: LayerStyle, layer: nn.Module) -> bool:
    """Return whether a layer with this style returns blocks to the code after it."""
    if isinstance(style, Column):
        return not style.gathered or style.sequence
    if isinstance(style, Heads):
        return not style.attributes
    if isinstance(style, SequencePart):
        return style.begins
    by_sequence: bool = getattr(style, "sequence", False)
    return by_sequence or (isinstance(style, DividedVocabulary) and not isinstance(layer, nn.Embedding))


class _Room:
    """Decides which layers of a model return values: all, or one of each kind once they have many values."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._seen: set[tuple[str, str]] = set()
        self._left = _MOST_VALUES

    def has(self, name: str, output: Any) -> bool:
        """Return whether a layer returns values in this call."""
        parent = self._model.get_submodule(name.rpartition(".")[0])
        kind = _NUMBER.sub("*", name), _NUMBER.sub("*", repr(parent))
        if self._left < 0 and kind in self._seen:
            return False
        self._seen.add(kind)
        self._left -= sum(tensor.numel() for tensor in tensors_in(output))
        return True


@contextmanager
def _hooked(layers: Iterable[nn.Module], before: Any, after: Any) -> Iterator[None]:
    """Call ``before`` and ``after`` at each call of the layers in the ``with`` block."""
    handles = [layer.register_forward_pre_hook(before) for layer in layers]
    handles += [layer.register_forward_hook(after) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _random_states(model: nn.Module) -> dict[torch.Generator, Tensor]:
    """Return the states of the generators from which the model may draw."""
    devices = [tensor.device for tensor in (*model.parameters(), *model.buffers())]
    return {generator: generator.get_state() for generator in default_generators(devices)}
