"""Divided stage: divides the updates of a stage's parameters over the replicas."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from pipesched.errors import ModelTypeError
from pipesched.runtime.gradients.shards import Shards
from pipesched.runtime.stage.sharded_update import ShardedUpdate, Spread
from pipesched.runtime.stage.stage import Stage

__all__ = ["divided_update", "shards_for"]

#: The optimizers known to update each number of a parameter independently of the others.
_ELEMENTWISE = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)


def divided_update(stage: Stage, spread: Spread, replica: int, num_replicas: int) -> ShardedUpdate:
    """Let a stage's optimizer update this replica's part of the parameters.

    For optimizers of torch that are known to be elementwise, parameters are cut by rows. Any other optimizer, such as
    Muon, Adafactor or a subclass, may combine the numbers of a parameter, so it gets whole parameters.

    Args:
        stage: a stage with an optimizer and several replicas.
        spread: sends rows to all replicas.
        replica: the replica of this process.
        num_replicas: the number of replicas.

    Raises:
        ModelTypeError: a parameter is already sharded, or the optimizer has a state that cannot be divided.

    """
    optimizer = stage.optimizer.wrapped
    gradients = stage.gradients
    assert optimizer is not None
    assert gradients is not None
    if sharded := [parameter for parameter in stage.optimizer.parameters if hasattr(parameter, "full_tensor")]:
        raise ModelTypeError(
            f"zero= divides plain parameters over replicas; the layers {', '.join(stage.layers)} have {len(sharded)} "
            f"parameters that are already sharded, for example by fully_shard; leave zero= out, or do not shard them"
        )
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    parameters = [parameter for parameter in stage.optimizer.parameters if parameter in held]
    shards = shards_for(optimizer, parameters, replica, num_replicas)
    early = {*gradients.parameters}
    late = [parameter for parameter in parameters if parameter not in early]
    update = ShardedUpdate(optimizer, shards, [*gradients.buckets, late], spread)
    stage.optimizer.sharded = update
    return update


def shards_for(optimizer: Optimizer, parameters: Sequence[nn.Parameter], replica: int, num_replicas: int) -> Shards:
    """Return the part of each replica in the parameters of one stage. ``optimizer`` decides whether they are cut."""
    cuts = type(optimizer) in _ELEMENTWISE  # a subclass may do anything
    return Shards(parameters, replica, num_replicas, cuts=cuts)
