"""Stage optimizer: updates the parameters of one stage, during the run or after it."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from pipesched.errors import ExecutionError
from pipesched.runtime.gradients.norms import GradientNorms
from pipesched.runtime.gradients.rules import GradientRules, Verdict
from pipesched.runtime.stage.sharded_update import ShardedUpdate
from pipesched.runtime.stage.weight_stash import WeightStash

__all__ = ["StageOptimizer"]


class StageOptimizer:
    """Updates the parameters of one stage's modules. Error messages contain the names in ``layers``."""

    def __init__(self, modules: Mapping[str, nn.Module], layers: Iterable[str]) -> None:
        self._modules = modules
        self._layers = layers
        #: The user's optimizer; None if it had nothing to hold when the pipeline was made.
        self.wrapped: Optimizer | None = None
        #: Updates this replica's part of the parameters; None if every replica updates all parameters.
        self.sharded: ShardedUpdate | None = None
        #: Tied parameters that another stage updates.
        self.elsewhere: Collection[nn.Parameter] = ()
        #: Whether updates wait for the gradients of tied parameters, which are summed after the run.
        self.late = False
        #: The rules for gradients before an update; None to leave gradients unchanged.
        self.rules: GradientRules | None = None
        #: The decision of the last update; None without rules, and before the first update.
        self.verdict: Verdict | None = None
        #: Called before the optimizer runs, with whether the update is skipped.
        self.before_step: Callable[[bool], None] | None = None
        self._waiting = False

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the modules, except the parameters that another stage updates."""
        own = dict.fromkeys(parameter for module in self._modules.values() for parameter in module.parameters())
        return [parameter for parameter in own if parameter not in self.elsewhere]

    def norm(self, losses: Iterable[Tensor]) -> GradientNorms:
        """Return the norms of the gradients accumulated since the last update.

        Returns no norms if there are no rules, or if updates wait for the gradients of tied parameters.
        ``losses`` contains the losses of the stage's micro-batches.
        """
        if self.late or self.rules is None:
            return GradientNorms("", None)
        return self.measure(self.rules, losses)

    def measure(self, rules: GradientRules, losses: Iterable[Tensor]) -> GradientNorms:
        """Unscale the gradients and return their norms. Collective over replicas if gradients are split."""
        norms = rules.measure(self.parameters, losses)
        return norms if self.sharded is None else GradientNorms.merged([norms, self.sharded.measure(rules)])

    def update(self, weights: WeightStash | None, norms: Sequence[GradientNorms] = ()) -> None:
        """Step the optimizer with the gradients accumulated since the last update.

        Args:
            weights: the weight versions in flight; None if no update occurs while
                micro-batches are in flight.
            norms: the gradient norms of all stages if there are rules; otherwise unused.

        """
        if self.late:
            self._waiting = True
            return
        if self.rules is not None:
            self.verdict = self.rules.decide(norms)
        if weights is not None:
            weights.before_update()
        self._step()
        if weights is not None:
            weights.after_update()

    def update_late(self, verdict: Verdict | None) -> None:
        """Run the update that was postponed until the gradients of tied parameters were summed."""
        if self._waiting:
            self._waiting = False
            self.verdict = verdict
            self._step()

    def wait(self) -> None:
        """Wait for the weights that other replicas update."""
        if self.sharded is not None:
            self.sharded.wait()

    def drop_gradients(self) -> None:
        """Clear the gradients of a failed run, so that the next update does not use them."""
        if self.wrapped is not None:
            self._waiting = False
            (self.sharded or self.wrapped).zero_grad()

    def _step(self) -> None:
        if self.wrapped is not None:
            if self.rules is not None and self.verdict is not None:
                divided = [] if self.sharded is None else self.sharded.divided
                self.rules.prepare([*self.parameters, *divided], self.verdict)
            optimizer = self.wrapped if self.sharded is None else self.sharded
            skips = self.verdict is not None and self.verdict.skips
            if self.before_step is not None:
                self.before_step(skips)
            if not skips:
                optimizer.step()
            optimizer.zero_grad()
        elif any(parameter.requires_grad and parameter.grad is not None for parameter in self.parameters):
            raise ExecutionError(
                f"a stage has no optimizer if its parameters were all frozen when the pipeline was made and optimizer= "
                f"takes only trainable ones; parameters of its layers {', '.join(self._layers)} have gradients now; "
                f"make a new Pipeline, or freeze the parameters again, or let optimizer= take all parameters"
            )
