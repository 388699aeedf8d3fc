"""User flags: the flags that user code sets on a process's own modules and parameters, such as ``requires_grad``.

Under a mesh, ``pipe.parameters()`` and ``pipe.modules()`` cover only the stages of a process. Code that freezes
weights, or puts norms into evaluation mode, therefore changes the flags only in the process that runs them. The flags
move with the layers.
"""

from collections.abc import Iterable, Mapping

from torch import nn

from pipesched.saving.live_run import LiveRun

__all__ = ["share_flags"]


def share_flags(run: LiveRun, roots: Mapping[str, nn.Module], run_here: Iterable[nn.Module]) -> None:
    """Set the flags of all modules and parameters as in the processes that run them. Collective.

    Args:
        run: the run, with the parameters that this process trains.
        roots: the model and the loss module, keyed by the prefix of their parameters' names.
        run_here: the modules of this process's stages.

    """
    here = {id(part) for module in run_here for part in module.modules()}
    modules = {prefix + name: part for prefix, root in roots.items() for name, part in root.named_modules()}
    parameters = run.parameters_of(roots)
    trains = {name: parameter.requires_grad for name, parameter in run.parameters.items()}
    modes = {name: part.training for name, part in modules.items() if id(part) in here}
    for their_trains, their_modes in reversed(run.host.collectives.gathered_in_all((trains, modes))):
        for name, flag in their_trains.items():
            parameters[name].requires_grad_(flag)
        for name, flag in their_modes.items():
            modules[name].training = flag
