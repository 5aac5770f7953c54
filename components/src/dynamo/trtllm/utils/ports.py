"""Variables that hold a port, checked before Dynamo's runtime reads them: it would fail late, or ignore them
silently."""

from __future__ import annotations

import re
from collections.abc import Mapping

from dynamo.trtllm.errors import StartupError

_MOST = 65_535
PORT_VARIABLES: Mapping[str, tuple[int, int]] = {
    "DYN_SYSTEM_PORT": (-1, 32_767),
    "DYN_TCP_RPC_PORT": (0, _MOST),
    "DYN_TCP_RESPONSE_STREAM_PORT": (0, _MOST),
}
"""Name -> the least and the largest port. The runtime reads the first as a signed 16-bit number; -1 turns it
off."""
_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,5}")


def check_ports(environment: Mapping[str, str]) -> None:
    """Raise `StartupError` for the first variable whose value is no port; an empty one counts as not set."""
    for name, (least, most) in PORT_VARIABLES.items():
        text = environment.get(name, "").strip()
        if not text or (_NUMBER.fullmatch(text) and least <= int(text) <= most):
            continue
        advice = ""
        if text.startswith("tcp://"):
            service = name.removesuffix("_PORT").lower().replace("_", "-")
            advice = (
                f" (Kubernetes sets it so for a service named {service}: set it yourself, or set "
                "enableServiceLinks: false)"
            )
        none = ", or -1 for none" if least < 0 else ""
        raise StartupError(f"{name} must be a port number from 0 to {most}{none}, not {text[:80]!r}{advice}")
