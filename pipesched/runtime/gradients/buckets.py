"""Gradient buckets: sums the gradients of parameters over replicas, bucket by bucket, while the rank computes."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pipesched.errors import ExecutionError
from pipesched.runtime.gradients.divided_copies import Divided, DividedCopies
from pipesched.runtime.gradients.norms import GradientNorms
from pipesched.tensors.flat_buffers import by_gradient_dtype, places

__all__ = ["GradientBuckets", "StartedSum", "Sums", "local"]


class StartedSum(Protocol):
    """A started sum over replicas."""

    #: The start and the end of the sum, on the clock of the rank's executor; None until the sum has ended.
    span: tuple[Any, Any] | None

    def wait(self, check: Callable[[], None]) -> None:
        """Wait for the sum. ``check`` is called while waiting, and may raise."""


class Sums(Protocol):
    """Sums buffers over replicas."""

    def length(self, numbers: int) -> int:
        """Return the length of a buffer for ``numbers`` elements. The length can include padding."""

    def start(self, buffers: Sequence[Tensor], *, of_shards: bool = False) -> StartedSum:
        """Start replacing buffers with their sums over replicas.

        If ``of_shards`` is set, each sum includes only the replicas that hold the same shards.
        """

    def any(self, flag: Tensor) -> Tensor:
        """Return whether a 0-d flag is set in any replica. Waits for all replicas."""

    def scatter(self, buffers: list[Tensor]) -> StartedSum:
        """Start a reduce-scatter of buffers that have one row per replica.

        Each buffer is replaced with this replica's row, summed over the buffers of all replicas.
        """

    def check(self) -> None:
        """Raise an exception if another rank has failed."""


class GradientBuckets:
    """Parameters whose gradients are summed over replicas, in buckets.

    A step's gradients are summed over replicas, then added to the gradients that the parameters had before the step.

    Args:
        buckets: the parameters of each bucket.
        sums: sums buffers over replicas.
        sharded: the parameters that replicas divide among themselves.

    """

    def __init__(
        self, buckets: Iterable[Sequence[nn.Parameter]], sums: Sums, sharded: Collection[nn.Parameter] = ()
    ) -> None:
        #: The parameters of each bucket.
        self.buckets = [list(bucket) for bucket in buckets]
        self._sums = sums
        self._sharded = sharded
        #: For each parameter whose gradient sum is split across replicas: the object that receives this replica's part.
        self.divided: Mapping[nn.Parameter, Divided] = {}
        self._before: dict[nn.Parameter, Any] = {}
        self._started: list[tuple[int, _FlatGradients | DividedCopies, StartedSum]] = []
        self._next = 0  # the first bucket that has not been started
        #: The start and the end of each bucket's last sum, on the clock of the rank's executor.
        self.spans: dict[int, tuple[Any, Any]] = {}

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of all buckets."""
        return [parameter for bucket in self.buckets for parameter in bucket]

    def begin(self) -> None:
        """Set the gradients of earlier steps aside. Called before each step."""
        self._started.clear()
        self._before.clear()
        self.spans.clear()
        for parameter in self.parameters:
            if parameter.requires_grad and parameter.grad is not None:
                self._before[parameter] = parameter.grad
                parameter.grad = None
        self._next = 0

    @contextmanager
    def completing(self) -> Iterator[None]:
        """A context for the stage's last backward: starts each sum as soon as the gradients of its bucket are complete.

        The sum of a bucket starts after the sums of all earlier buckets. So all replicas start their sums in the same
        order, even if a parameter is unused in some replicas.
        """
        missing = [{parameter for parameter in bucket if parameter.requires_grad} for bucket in self.buckets]

        def completed(own: set[nn.Parameter], parameter: nn.Parameter) -> None:
            own.discard(parameter)
            while self._next < len(missing) and not missing[self._next]:
                self.start(self._next)

        hooks = [
            parameter.register_post_accumulate_grad_hook(partial(completed, own))
            for own in missing
            for parameter in own
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def common(self, norms: GradientNorms) -> GradientNorms:
        """Return the norms, with ``nonfinite`` set if any replica has set the flag, so that all replicas agree."""
        return norms if norms.nonfinite is None else norms._replace(nonfinite=self._sums.any(norms.nonfinite))

    def start(self, bucket: int) -> None:
        """Start the sum of a bucket, unless it has already started. Raises ExecutionError for a sparse gradient."""
        if bucket < self._next:
            return
        self._next = bucket + 1
        parameters = [parameter for parameter in self.buckets[bucket] if parameter.requires_grad]
        _check_dense(parameters)
        whole = [parameter for parameter in parameters if parameter not in self.divided]
        for of_shards in (False, True):
            added = [parameter for parameter in whole if (parameter in self._sharded) is of_shards]
            if added:
                copies = _FlatGradients(added, self._sums.length)
                self._started.append((bucket, copies, self._sums.start(copies.buffers, of_shards=of_shards)))
        if len(whole) < len(parameters):
            parts = DividedCopies({p: self.divided[p] for p in parameters if p in self.divided})
            self._started.append((bucket, parts, self._sums.scatter(parts.buffers)))

    def wait(self) -> None:
        """Wait for the sums that were started, and store them in the parameters' gradients."""
        started = self._started
        self._started = []
        for bucket, copies, ticket in started:
            ticket.wait(self._sums.check)
            copies.deliver(self._before)
            if ticket.span is not None:
                self.spans[bucket] = ticket.span


class _FlatGradients:
    """The gradients of a bucket in flat buffers, one for each dtype.

    A buffer ends with one number per parameter: 1 if the parameter has a gradient, else 0. After the sum over
    replicas, this number shows how many replicas have a gradient; some replicas may not use the parameter.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], length: Callable[[int], int]) -> None:
        self._groups = by_gradient_dtype(parameters)
        self.buffers = [_flat(dtype, own, length) for dtype, own in self._groups.items()]

    @torch.no_grad()
    def deliver(self, before: dict[nn.Parameter, Any]) -> None:
        """Set the parameters' gradients to the sums, plus the earlier gradients in ``before``.

        The gradients of these parameters are removed from ``before``.
        """
        for buffer, parameters in zip(self.buffers, self._groups.values(), strict=True):
            shapes = [local(parameter) for parameter in parameters]
            users = buffer[sum(shape.numel() for shape in shapes) :]
            for place, (parameter, (_, total)) in enumerate(zip(parameters, places(shapes, buffer), strict=True)):
                if parameter.grad is None and parameter.requires_grad and users[place].item():
                    parameter.grad = torch.empty_like(parameter)  # only other replicas use the parameter
                if parameter.grad is not None:
                    local(parameter.grad).copy_(total)
                old = before.pop(parameter, None)
                if old is not None:
                    parameter.grad = old if parameter.grad is None else old.add_(parameter.grad)


def _check_dense(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise ExecutionError(
                f"gradients must be dense to be summed over replicas; a parameter of shape "
                f"{tuple(parameter.shape)} has a sparse gradient; make its layer with sparse=False"
            )


@torch.no_grad()
def _flat(dtype: torch.dtype, parameters: Sequence[nn.Parameter], length: Callable[[int], int]) -> Tensor:
    """Return a buffer with all gradients, then one number per parameter: 1 if the parameter has a gradient, else 0."""
    shapes = [local(parameter) for parameter in parameters]
    count = sum(shape.numel() for shape in shapes)
    buffer = torch.zeros(length(count + len(parameters)), dtype=dtype, device=shapes[0].device)
    for place, (parameter, (_, own)) in enumerate(zip(parameters, places(shapes, buffer), strict=True)):
        if parameter.grad is not None:
            own.copy_(local(parameter.grad))
            buffer[count + place] = 1
    return buffer


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds: the shard of a DTensor, otherwise the tensor."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()
