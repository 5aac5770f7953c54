"""The end of a process in which something refuses to end: a thread, a request, a library."""

from __future__ import annotations

import faulthandler
import os
import threading
import time

EXIT_STUCK = 71


def exit_after(seconds: float) -> None:
    """End this process with `EXIT_STUCK` if it still runs after so many seconds.

    A library that holds the interpreter stops every Python thread. A timer without Python then ends
    the process one second later, with status 1 and the stack of each thread on standard error.
    """
    threading.Thread(target=_exit, args=(seconds,), name="last-resort", daemon=True).start()
    faulthandler.dump_traceback_later(seconds + 1.0, exit=True)


def _exit(seconds: float) -> None:
    time.sleep(seconds)
    message = f"dynamo.trtllm: not everything ended within {seconds:g} s, exiting with {EXIT_STUCK}\n"
    os.write(2, message.encode())
    os._exit(EXIT_STUCK)
