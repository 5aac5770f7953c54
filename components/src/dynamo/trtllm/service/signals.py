"""What SIGTERM and SIGINT do until the worker serves: end it at once. From then on `runtime.py` handles them.

Imports only what Python has loaded by itself: this runs before anything slow is imported.
"""

from __future__ import annotations

import os
import signal

_FORWARDED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}


def end_at_once_on_signals() -> None:
    """Leave SIGTERM and SIGINT to the kernel, which ends a process whatever it does: 143 and 130 in a shell.

    A handler in Python would have to wait for imports and for Dynamo's library, which hold the interpreter.
    The kernel spares PID 1, as which a container starts its command: that becomes the worker's parent.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    if os.getpid() == 1:
        _continue_in_child()


def _continue_in_child() -> None:
    """Return in a child only; this process passes its signals on to it, and ends with its status."""
    watched = {*_FORWARDED, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    child = os.fork()
    if child == 0:
        os.setsid()  # a terminal's Ctrl-C would arrive twice, and a second signal ends without draining
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    while True:
        number = signal.sigwait(watched)
        if number in _FORWARDED:
            os.kill(child, number)
        else:
            _reap(child)


def _reap(child: int) -> None:
    """Collect what has ended, orphans too, as is PID 1's duty; ends this process when `child` is among it."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
        if pid == 0:
            return
