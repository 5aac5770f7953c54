"""Keys of `mm_processor_kwargs` that say which frames of a video are chosen,
as Transformers' video processors name them."""

from __future__ import annotations

from collections.abc import Mapping

from dynamo.trtllm.engines.port import ProcessorOption

_COUNT = ProcessorOption(least=1, most=10_000)
FRAME_OPTIONS: Mapping[str, ProcessorOption] = {
    "fps": ProcessorOption(least=0.01, most=120.0, whole=False),
    "num_frames": _COUNT,
    "min_frames": _COUNT,
    "max_frames": _COUNT,
}
