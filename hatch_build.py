"""Build hook: makes `dynamo.trtllm` resolve to this distribution although
`ai-dynamo` installs a package of the same name.

`dynamo` is a namespace package, so the first folder on `sys.path` that holds a `dynamo/trtllm` provides it.
One line in a `.pth` file puts our folder first: from a wheel that is `dynamo_trtllm_overlay/` in
site-packages, from an editable install `components/src` of the checkout. Nothing of `ai-dynamo` is
overwritten, so uninstalling gives its package back.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PTH_NAME = "dynamo_trtllm_overlay.pth"
WHEEL_FOLDER = 'os.path.join(sitedir, "dynamo_trtllm_overlay")'
"""`sitedir` is the folder of the `.pth` file:
a local variable of the function in `site` that executes the line."""


def pth_line(folder_expression: str) -> str:
    """The line that moves the folder named by a Python expression to the front of `sys.path`."""
    return (
        f"import os, sys; p = {folder_expression}; p in sys.path and sys.path.remove(p); "
        "sys.path.insert(0, p)\n"
    )


class OverlayHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the `.pth` file to a standard or an editable wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        editable = version == "editable"
        folder = repr(os.path.join(self.root, "components", "src")) if editable else WHEEL_FOLDER
        descriptor, self.pth = tempfile.mkstemp(suffix=".pth")
        with os.fdopen(descriptor, "w") as file:
            file.write(pth_line(folder))
        build_data["force_include_editable" if editable else "force_include"][self.pth] = PTH_NAME

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        os.unlink(self.pth)
