"""TensorRT-LLM 1.4.0rc2, which Dynamo 1.7 pairs with: read from the documentation of the candidates around
it.

What 1.4.0rc1 and 1.4.0rc4 both document holds for 1.4.0rc2. What only 1.4.0rc4 documents is left out: the
adapter asks the installed library, so a field that is there and not recorded costs a line of the report
and nothing else.
"""

from __future__ import annotations

from dataclasses import replace

from dynamo.trtllm.engines.tensorrt_llm.record.releases import v1_3_0rc29 as before

RELEASE = replace(
    before.RELEASE,
    version="1.4.0rc2",
    nested={
        **before.NESTED,
        "cache_transceiver_config": {
            **before.TRANSCEIVER,
            "transceiver_runtime": "PYTHON",
            "agent_bounce_params": None,
        },
    },
    nested_sources={
        "cache_transceiver_config": "D141, D144",
        "kv_cache_config": "D29t, D144",
        "*": "D29t, inferred",
    },
    behaviours={
        **before.BEHAVIOURS,
        "opaque_state": ("None or empty: the Python transceiver is the default", "D141, dyn"),
        "block reuse policy": (
            "kv_cache_config.block_reuse_config.policy, no longer block_reuse_policy",
            "D144",
        ),
        "removed arguments": (("sampler_type", "decoding_config"), "P18232, inferred"),
    },
    sources={**dict.fromkeys(before.RELEASE.sources, "D29, inferred"), "disaggregated": "M29, D144"},
    read_from="documentation",
)
