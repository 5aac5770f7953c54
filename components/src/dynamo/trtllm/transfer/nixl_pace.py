"""When the transfer thread looks again, and how to tell a thread
that hangs from a process that was stopped."""

from __future__ import annotations

import math
import time

from dynamo.trtllm.transfer.nixl_agent import SPIN_S

MOVE_PAUSE_S = 0.001
"""Longest pause between two looks at reads and writes in flight."""
OFFER_PAUSES_S = (250e-6, 0.002)
"""Shortest and longest pause between two looks for acknowledgements:
they free memory, nobody waits for them."""
IDLE_PAUSE_S = 0.02
"""Pause while nothing is outstanding.
A peer that connects needs a few looks of this side before its first read can end."""
COMPLAINT_PAUSE_S = 10.0
"""Between two lines of the log about errors of the thread."""
_LONGEST_CHECK_PAUSE_S = 1.0


class Pace:
    """How long to pause: the longer the outstanding transfers have waited, the longer."""

    def __init__(self) -> None:
        self.expecting = False
        """True while offers wait for their acknowledgement."""
        self.last_offer = time.perf_counter()
        self._next_complaint = -math.inf

    def pause_s(self, last_posted: float | None) -> float:
        """Seconds to the next look. `last_posted` is when the youngest move
        under way was posted, None without one."""
        now = time.perf_counter()
        if last_posted is not None:
            pause_s = min((now - last_posted) / 16, MOVE_PAUSE_S)
            return pause_s if pause_s >= SPIN_S else 0.0
        if self.expecting:
            shortest, longest = OFFER_PAUSES_S
            return min(max((now - self.last_offer) / 8, shortest), longest)
        return IDLE_PAUSE_S

    def may_complain(self) -> bool:
        """True when the last line about an error is long enough ago for another one."""
        now = time.perf_counter()
        if now < self._next_complaint:
            return False
        self._next_complaint = now + COMPLAINT_PAUSE_S
        return True


class StandstillWatch:
    """For how long a counter has stood still, as seen by someone who looks about once a second.

    A look that comes late counts as one second:
    a process that was stopped for a while is no thread that hangs.
    """

    def __init__(self) -> None:
        self._seen = -1
        self._still_s = 0.0
        self._looked = time.monotonic()

    def still_s(self, count: int) -> float:
        """Seconds of attention since `count` last changed."""
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, _LONGEST_CHECK_PAUSE_S), now
        self._still_s = self._still_s + passed if count == self._seen else 0.0
        self._seen = count
        return self._still_s
