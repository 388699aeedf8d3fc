"""Divided stage: divides a stage's parameters, or only the work of updating them, among the replicas."""

from collections.abc import Sequence
from itertools import chain

from torch import nn
from torch.optim import Optimizer

from pipesched.errors import ModelTypeError
from pipesched.runtime.gradients.shards import Shards
from pipesched.runtime.stage.divided_weights import DividedWeights
from pipesched.runtime.stage.elementwise import is_elementwise
from pipesched.runtime.stage.sharded_update import ShardedUpdate, Spread
from pipesched.runtime.stage.stage import Stage

__all__ = ["divided_update", "divided_weights", "shards_for"]


def divided_update(stage: Stage, spread: Spread, replica: int, num_replicas: int) -> ShardedUpdate:
    """Let a stage's optimizer update only this replica's part of the parameters.

    Parameters are cut by rows if the optimizer is a torch optimizer that updates each element independently. Any other
    optimizer, such as Muon, Adafactor or an instance of a subclass, may combine the elements of a parameter. The
    parameters of such an optimizer are not cut.

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
    _check_plain(stage)
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    parameters = [parameter for parameter in stage.optimizer.parameters if parameter in held]
    shards = shards_for(optimizer, parameters, replica, num_replicas)
    early = {*gradients.parameters}
    late = [parameter for parameter in parameters if parameter not in early]
    update = ShardedUpdate(optimizer, shards, [*gradients.buckets, late], spread)
    stage.optimizer.sharded = update
    return update


def divided_weights(stage: Stage, spread: Spread, replica: int, num_replicas: int) -> DividedWeights:
    """Let this replica hold only its rows of a stage's weights between runs. Tied weights are not divided.

    A replica holds the rows that it updates. Weights that no optimizer updates are cut by rows. If the stage has an
    optimizer, call ``divided_update`` first.

    Args:
        stage: a stage with several replicas.
        spread: sends rows to all replicas.
        replica: the replica of this process.
        num_replicas: the number of replicas.

    Raises:
        ModelTypeError: a parameter is already sharded.

    """
    assert stage.gradients is not None
    _check_plain(stage)
    update = stage.optimizer.sharded
    shards = Shards([], replica, num_replicas, cuts=True) if update is None else update.shards
    units: list[list[nn.Parameter]] = []
    seen: set[nn.Parameter] = set()
    for bucket in reversed(stage.gradients.buckets):  # the first layer's bucket comes first
        units.append([parameter for parameter in dict.fromkeys(bucket) if parameter not in seen])
        seen.update(bucket)
    shards.add([parameter for parameter in chain(*units) if parameter not in shards], cuts=True)
    stage.divided_weights = weights = DividedWeights(units, shards, update, spread)
    if update is not None:
        update.unsent = weights
    weights.divide()
    return weights


def _check_plain(stage: Stage) -> None:
    if sharded := [parameter for parameter in stage.optimizer.parameters if hasattr(parameter, "full_tensor")]:
        raise ModelTypeError(
            f"zero= cannot split parameters across replicas if they are already sharded, for example by fully_shard; "
            f"the number of sharded parameters in layers {', '.join(stage.layers)} is {len(sharded)}; leave zero= out, "
            f"or do not shard the parameters"
        )


def shards_for(optimizer: Optimizer, parameters: Sequence[nn.Parameter], replica: int, num_replicas: int) -> Shards:
    """Return the shards of one stage's parameters. Parameters are cut only if the optimizer's type allows cuts."""
    return Shards(parameters, replica, num_replicas, cuts=is_elementwise(optimizer))
