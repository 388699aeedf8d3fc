"""Jobs of test_refused_loads: a load that one rank refuses."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pipesched import Pipeline
from pipesched.errors import CheckpointError
from tests.support import places

X = torch.linspace(-1, 1, 32).reshape(8, 4)


class Average:
    """An object with a state, which one rank does not load."""

    def __init__(self, likes: bool) -> None:
        self.value, self.likes = torch.zeros(3), likes

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value.copy_(state["value"])
        if not self.likes:
            raise KeyError("count")


def one_rank_refuses(group: Any, folder: str) -> tuple[str, bool]:
    """Return the kind of this rank's error, and whether everything is as before."""
    torch.manual_seed(0)
    model, average = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), Average(group.rank() == 0)
    options: dict[str, Any] = {"schedule": "1f1b", "boundaries": [1], "num_microbatches": 4}
    with Pipeline(model, X[:2], loss_fn=functional.mse_loss, **places.place(group), **options) as pipe:
        pipe.step(X, target=X)
        pipe.save(folder, extra={"average": average})
        average.value += 1
        weights = [parameter.detach().fill_(7.0).clone() for parameter in pipe.parameters()]
        try:
            pipe.load(folder, extra={"average": average})
            said = ""
        except CheckpointError as error:
            said = "a failure of rank 1" if "rank 1 failed: KeyError" in str(error) else str(error)
        except KeyError:
            said = "KeyError"
        same = all(torch.equal(one, other) for one, other in zip(pipe.parameters(), weights, strict=True))
        return said, same and bool((average.value == 1).all())
