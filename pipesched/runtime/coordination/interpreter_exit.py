"""Interpreter exit: lets the user's daemon threads leave a step before Python exits.

While Python exits, a daemon thread that returns from a torch operation is ended inside torch's C++ code, which aborts
the process. So the exit waits until no such thread is inside a call of a pipeline. A thread that makes another call, or
gets a message of another process, stops there. Usually Python has exited before the thread would go on.
"""

import atexit
import threading
import time
from multiprocessing import util  # noqa: F401  registers its function first
from weakref import finalize

from pipesched.errors import ExecutionError
from pipesched.runtime.coordination.rank_activity import is_in_call

__all__ = ["EXIT", "InterpreterExit"]

_PATIENCE_S = 60.0  # the longest time that the exit waits for calls in progress
_CALM_S = 0.2  # how long no thread may have run a call; a loop is outside its calls only briefly
_PAUSE_S = 0.01
_STOP_S = 5.0  # how long a call stops its thread; a function that the script registered to run at exit may join it
_OWN = "pipesched"  # the first letters of the names of pipesched's own threads, which end in their own ways


class InterpreterExit:
    """Whether Python has begun to exit."""

    begun = False

    def __init__(self) -> None:
        # The function that was registered last runs first: after most functions of the script, which may join its
        # threads, and before the functions of weakref and multiprocessing, which end the ranks.
        finalize(self, int).detach()
        atexit.register(self._begin)

    def check(self) -> None:
        """Stop the calling thread for some seconds, and raise ExecutionError, if this is a daemon thread of the user.

        Does nothing unless Python exits.
        """
        if self.begun and threading.current_thread() in _daemons():
            time.sleep(_STOP_S)
            raise ExecutionError(
                "a pipeline must not be used while Python exits; a daemon thread called it; end the thread before the "
                "script ends"
            )

    def _begin(self) -> None:
        self.begun = True
        end_s = time.monotonic() + _PATIENCE_S
        calm_s = time.monotonic()
        while time.monotonic() < min(end_s, calm_s + _CALM_S) and _daemons():
            if any(is_in_call(thread.ident or 0) for thread in _daemons()):
                calm_s = time.monotonic()
            time.sleep(_PAUSE_S)


def _daemons() -> list[threading.Thread]:
    """Return the user's daemon threads. Python itself has waited for other threads before."""
    return [thread for thread in threading.enumerate() if thread.daemon and not thread.name.startswith(_OWN)]


#: The exit of this process.
EXIT = InterpreterExit()
