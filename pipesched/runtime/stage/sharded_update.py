"""Sharded update: an optimizer that updates one replica's part of a stage's parameters.

For each part that this replica updates, the optimizer has a local parameter, which is a view of rows of the stage's
parameter. Therefore the optimizer has states for these rows only. After the optimizer's step, each replica sends its
updated rows to all other replicas.
"""

from collections.abc import Container, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipesched.errors import ExecutionError, ModelTypeError
from pipesched.runtime.gradients.buckets import StartedSum
from pipesched.runtime.gradients.norms import GradientNorms
from pipesched.runtime.gradients.rules import GradientRules
from pipesched.runtime.gradients.shards import Shards
from pipesched.tensors.gradient_norm import combined_norms, norm_of

__all__ = ["ShardedUpdate", "Spread"]


class Spread(Protocol):
    """Sends tensors between replicas."""

    def spread(self, parts: Sequence[Sequence[Sequence[Tensor]]]) -> StartedSum:
        """Start to copy tensors between replicas, with one collective for each entry of ``parts``.

        An entry contains one list of tensors per replica. Replica i sends the tensors in list i, and the other replicas
        receive them into their own tensors in list i.
        """

    def gathered(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensor that each replica passes, in replica order. Waits for all replicas."""

    def check(self) -> None:
        """Raise an exception if another rank has failed."""


class ShardedUpdate:
    """Updates one replica's part of a stage's parameters.

    Args:
        optimizer: the stage's optimizer. The constructor replaces the optimizer's parameters with local parameters.
        shards: the rows of each parameter that each replica updates.
        buckets: the stage's parameters, in groups whose rows are sent together.
        spread: sends rows to all replicas.

    Raises:
        ModelTypeError: the optimizer has a state that cannot be divided by rows.

    """

    def __init__(
        self, optimizer: Optimizer, shards: Shards, buckets: Iterable[Sequence[nn.Parameter]], spread: Spread
    ) -> None:
        self._optimizer = optimizer
        #: The rows of each parameter that each replica updates.
        self.shards = shards
        self._buckets = [[parameter for parameter in bucket if parameter in shards] for bucket in buckets]
        self._spread = spread
        self._ticket: StartedSum | None = None
        self._checked = False
        self._taken: set[nn.Parameter] = set()  # the parameters whose gradients are divided
        #: Parameters whose rows are not sent after an update, because the next run gathers them.
        self.unsent: Container[nn.Parameter] = ()
        #: For each parameter group, the stage's parameters that the optimizers of all replicas update.
        self.groups: list[list[nn.Parameter]] = [list(group["params"]) for group in optimizer.param_groups]
        self._names = [list(group.get("param_names", ())) for group in optimizer.param_groups]
        #: Each parameter that this replica updates, in part or in full -> its local parameter.
        self.local: dict[nn.Parameter, nn.Parameter] = {}
        for parameter in self.parameters:
            rows = shards.own(parameter, parameter.detach())
            if rows is not None:
                local = self.local[parameter] = nn.Parameter(rows, requires_grad=parameter.requires_grad)
                vars(local).update(vars(parameter))  # keep attributes that an optimizer may read
        self._localize()

    def _localize(self) -> None:
        """Replace the optimizer's parameters with local parameters, and cut the states to this replica's rows."""
        optimizer = self._optimizer
        for group in optimizer.param_groups:
            kept = [place for place, parameter in enumerate(group["params"]) if parameter in self.local]
            for key in {"params", "param_names"} & group.keys():
                group[key] = [group[key][place] for place in kept]
            group["params"] = [self.local[parameter] for parameter in group["params"]]
        for parameter in [key for key in optimizer.state if isinstance(key, nn.Parameter)]:
            state = optimizer.state.pop(parameter)
            if parameter in self.local:
                own = {name: self._own_rows(parameter, name, value) for name, value in state.items()}
                optimizer.state[self.local[parameter]] = own

    def end(self) -> None:
        """Give the optimizer the stage's parameters again, without states, for the stages of the next plan."""
        for group, parameters, names in zip(self._optimizer.param_groups, self.groups, self._names, strict=True):
            group["params"] = list(parameters)
            if names:
                group["param_names"] = names
        self._optimizer.state.clear()

    def _own_rows(self, parameter: nn.Parameter, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim() or self.local[parameter].shape == parameter.shape:
            return value
        rows = self.shards.own(parameter, value) if value.shape == parameter.shape else None
        if rows is None:
            raise ModelTypeError(
                f"with zero=, the states of an optimizer must have the shape of their parameter, or be scalars; state "
                f"{name!r} of {type(self._optimizer).__name__} has shape {list(value.shape)} for a parameter of shape "
                f"{list(parameter.shape)}; leave zero= out"
            )
        return rows.clone()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the stage that the optimizers of the replicas update."""
        return [parameter for bucket in self._buckets for parameter in bucket]

    @property
    def divided(self) -> list[nn.Parameter]:
        """The local parameters whose gradients ``take`` has received."""
        return [local for parameter, local in self.local.items() if parameter in self._taken]

    def shape(self, parameter: nn.Parameter) -> torch.Size:
        """Return the shape of the whole parameter."""
        return self.shards.shape(parameter)

    def own_rows(self, parameter: nn.Parameter) -> tuple[int, int] | None:
        """Return this replica's rows as (first, last + 1); None if the parameter is not cut."""
        return self.shards.own_rows(parameter)

    def parts(self, parameter: nn.Parameter, tensor: Tensor) -> list[Tensor | None]:
        """Return each replica's rows of ``tensor``, which has the parameter's shape; None for replicas without rows."""
        return self.shards.parts(parameter, tensor)

    def own(self, parameter: nn.Parameter, tensor: Tensor) -> Tensor | None:
        """Return this replica's rows of ``tensor``, which has the parameter's shape; None if it has no rows."""
        return self.shards.own(parameter, tensor)

    def take(self, parameter: nn.Parameter, grad: Tensor | None) -> None:
        """Receive this replica's rows of the summed gradient. ``grad`` is None if this replica has no rows."""
        self._taken.add(parameter)
        if grad is not None:
            self.local[parameter].grad = grad

    def step(self) -> None:
        """Update this replica's rows with the optimizer, and start to send the updated rows to all replicas."""
        self.follow(self.local)  # the parameters may have moved, for example by pipe.to(dtype)
        for parameter, local in self.local.items():
            if parameter.grad is not None:
                local.grad = self.shards.own(parameter, parameter.grad)
        self._optimizer.step()
        if not self._checked:
            self._check_states()
        self._send()

    def follow(self, parameters: Iterable[nn.Parameter]) -> None:
        """Make the local parameter of each of the ``parameters`` a view of the parameter's current memory."""
        for parameter in parameters:
            values = self.shards.own(parameter, parameter.detach()) if parameter in self.local else None
            if values is not None:
                self.local[parameter].data = values

    def _check_states(self) -> None:
        """Check, after the first step, that the optimizer has states for no parameters other than the local ones."""
        self._checked = True
        held = {*self.local.values()}
        if others := [key for key in self._optimizer.state if isinstance(key, nn.Parameter) and key not in held]:
            raise ExecutionError(
                f"with zero=, an optimizer must update the parameters in its param_groups, which hold the rows of this "
                f"replica; the number of other parameters for which {type(self._optimizer).__name__} has a state is "
                f"{len(others)}; leave zero= out"
            )

    def _send(self) -> None:
        """Start to send the updated rows to all replicas."""
        parts: list[list[list[Tensor]]] = []
        for bucket in self._buckets:
            by_dtype: dict[torch.dtype, list[list[Tensor]]] = {}
            for parameter in bucket:
                if (parameter.grad is not None or parameter in self._taken) and parameter not in self.unsent:
                    empty: list[list[Tensor]] = [[] for _ in range(self.shards.num_replicas)]
                    lists = by_dtype.setdefault(parameter.dtype, empty)
                    for own, rows in zip(lists, self.shards.parts(parameter, parameter.detach()), strict=True):
                        own.extend([] if rows is None else [rows])
            parts.extend(by_dtype.values())
        if parts:
            self._ticket = self._spread.spread(parts)

    def measure(self, rules: GradientRules) -> GradientNorms:
        """Unscale this replica's rows of the gradients, and return the norms of the whole gradients.

        The norms are computed from the norms of each replica's rows. Collective over the replicas and tensor groups.
        """
        measured = [parameter for parameter in self.parameters if parameter in self._taken]
        if not measured:
            return GradientNorms("", None)
        nonfinite = rules.unscale(self.divided)
        own = torch.zeros(len(measured) + 1, dtype=torch.float64, device=measured[0].device)
        for place, parameter in enumerate(measured):
            grad = self.local[parameter].grad if parameter in self.local else None
            if grad is not None:
                own[place] = norm_of(grad, rules.norm_type)
        if nonfinite is not None:
            own[-1] = nonfinite
        pieces = torch.stack(self._spread.gathered(own))
        norms = combined_norms(pieces[:, :-1], rules.norm_type, [parameter.dtype for parameter in measured])
        overflow = None if rules.scale is None else pieces[:, -1].any()
        if rules.planes is not None:
            norms, overflow = rules.planes.combined(measured, norms, overflow, rules.norm_type)
        return GradientNorms.named(measured, norms, rules.order, overflow)

    def wait(self) -> None:
        """Wait for the updated rows of the other replicas."""
        if self._ticket is not None:
            ticket, self._ticket = self._ticket, None
            ticket.wait(self._spread.check)

    def zero_grad(self) -> None:
        """Clear the gradients of the local parameters and of the stage's parameters."""
        self._optimizer.zero_grad(set_to_none=True)
        self._taken.clear()
        for parameter in self.parameters:
            parameter.grad = None
