"""The recorded releases, oldest first: a file and a line here for each."""

from __future__ import annotations

from collections.abc import Mapping

from dynamo.trtllm.engines.tensorrt_llm.record.release import Release
from dynamo.trtllm.engines.tensorrt_llm.record.releases import v1_2_1, v1_3_0rc29, v1_4_0rc2

RECORD: Mapping[str, Release] = {
    module.RELEASE.version: module.RELEASE
    for module in (
        v1_2_1,
        v1_3_0rc29,
        v1_4_0rc2,
    )
}
