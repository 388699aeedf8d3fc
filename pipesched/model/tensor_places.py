"""Tensor places: the modules that hold a model's parameters and buffers, and what a forward may change there.

A place is a module and the name of a parameter or buffer in this module. A layer may put new tensors at places of
buffers. A forward must not change places of parameters, because each parameter belongs to a stage from the start.
"""

from collections.abc import Callable, Collection, Iterator

from torch import Tensor, nn

from pipesched.errors import GraphError
from pipesched.model.attributes import Attributes
from pipesched.model.state_guard import reachable_parameters
from pipesched.tensors.torch_functions import version_of

__all__ = ["TensorPlaces", "changes_made_buffer", "check_keeps_weights", "check_made_buffers", "makes_weights"]

_Place = tuple[int, str]
_TABLES = "_parameters", "_modules"


class TensorPlaces:
    """The tensors of a model by place, kept up to date while layers run one after another.

    Args:
        model: the user's module.
        made: names of buffers that an earlier forward has made. Default: none.

    """

    def __init__(self, model: nn.Module, made: Collection[str] = ()) -> None:
        first = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        self._modules = list(model.modules())  # keeps modules alive so that no id is reused
        self._now = {place: tensor for module in self._modules for place, tensor in _places(module)}
        self._names = {place: first[id(tensor)] for place, tensor in self._now.items()}
        #: Names of the buffers that layers have made, in this forward or in an earlier one.
        self.made = set(made)
        #: id of a tensor of the model -> its name. Buffers that layers have made are left out.
        self.names = {tensor: name for tensor, name in first.items() if name not in self.made}

    def before(self, name: str, layer: nn.Module, is_of_layer: Callable[[Tensor], bool]) -> dict[str, Tensor]:
        """Return the layer's tensors before a call of the layer, keyed by name.

        Args:
            name: the layer's name.
            layer: the layer that will be called.
            is_of_layer: returns whether a tensor was made inside an earlier call of some layer.

        Raises:
            GraphError: other code has put another tensor at a place of the layer.

        """
        own: dict[str, Tensor] = {}
        for prefix, module in layer.named_modules():
            for place, tensor in _places(module):
                if self._now.get(place) is not tensor:
                    if isinstance(tensor, nn.Parameter) or not is_of_layer(tensor):
                        raise _replaced(name, _joined(prefix, place[1]))
                    self._put(module, place, tensor, _joined(name, prefix, place[1]))
                own[self._names[place]] = tensor
        return own

    def after(self, name: str, layer: nn.Module) -> list[str]:
        """Return the names of the buffers that a call of the layer has replaced or made.

        Raises:
            GraphError: the call has changed a place of a parameter.

        """
        changed = []
        for prefix, module in layer.named_modules():
            for place, tensor in _places(module):
                if self._now.get(place) is not tensor:
                    own = _joined(name, prefix, place[1])
                    if isinstance(tensor, nn.Parameter):
                        raise makes_weights(f"the forward of layer {name!r}", repr(own))
                    changed.append(self._put(module, place, tensor, own))
        return changed

    def _put(self, module: nn.Module, place: _Place, tensor: Tensor, name: str) -> str:
        if place not in self._names:
            self._names[place] = name
            self.made.add(name)
        self._now[place] = tensor
        self._modules.append(module)
        return self._names[place]


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _places(module: nn.Module) -> Iterator[tuple[_Place, Tensor]]:
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            yield (id(module), name), tensor


def makes_weights(who: str, what: str) -> GraphError:
    """Return the error for a forward that makes, exchanges or replaces a weight."""
    return GraphError(
        f"a forward must keep the modules and weights that the model has when the pipeline is built, because each "
        f"weight belongs to a stage and to the optimizer from the start; {who} makes or replaces {what}; if only the "
        f"first forward does this, call model(sample) once before you build the optimizer and the pipeline; otherwise "
        f"make the module in __init__"
    )


def check_keeps_weights(model: nn.Module, found: Attributes) -> None:
    """Raise GraphError if attributes that the code between layers has set hold parameters that the model has not."""
    own = set(map(id, model.parameters()))
    names = {module: name for name, module in model.named_modules()}
    for (module, name), value in found.items():
        for key, one in value.items() if name in _TABLES else [(name, value)]:
            if any(id(parameter) not in own for parameter in reachable_parameters(one)):
                raise makes_weights("the code between layers", repr(_joined(names.get(module, ""), key)))


def check_made_buffers(model: nn.Module, made: Collection[str], forward: Callable[[], None]) -> None:
    """Run a forward. Raise GraphError if it changes a buffer in ``made``, which an earlier forward has made."""
    before = {name: (buffer, version_of(buffer)) for name, buffer in model.named_buffers() if name in made}
    forward()
    for name, buffer in model.named_buffers():
        made_before, version = before.get(name, (buffer, version_of(buffer)))
        if buffer is not made_before or version_of(buffer) != version:
            raise changes_made_buffer(name)


def changes_made_buffer(name: str) -> GraphError:
    """Return the error for a buffer that the first forward makes and the next forward changes."""
    return GraphError(
        f"a buffer that forwards change must exist when the pipeline is built; the first forward makes the buffer "
        f"{name!r}, and the next forward changes it; register the buffer in __init__, or call model(sample) once "
        f"before you build the pipeline"
    )


def _replaced(layer: str, name: str) -> GraphError:
    return GraphError(
        f"code between layers must not replace the weights and buffers of a layer, because all stages run this code at "
        f"the same time; {name!r} of layer {layer!r} is not the layer's own tensor any more, as while "
        f"torch.func.functional_call runs; move this code and the layer into a module of their own, which calls "
        f"torch.func.functional_call or assigns the tensor in its forward, so that they run as one layer"
    )
