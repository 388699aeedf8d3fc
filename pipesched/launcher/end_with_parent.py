"""A program that ends with its parent: asks Linux to kill this process when the launcher dies, and runs the command.

    python end_with_parent.py PARENT COMMAND...

PARENT is the launcher's process. The request stays in force across ``execv``, so the command keeps this process. A
program of its own needs no code between fork and exec, which is unsafe in a process with threads.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):  # the launcher died before the request
        sys.exit("the launcher has ended before this rank could start")
    os.execv(sys.argv[2], sys.argv[2:])
