"""Where each recorded fact was read: a key of `SOURCES` stands beside every group and every behaviour.

`README.md` in this folder says release by release which group comes from where, and whether it was read or
inferred.
"""

from __future__ import annotations

from collections.abc import Mapping

from dynamo.trtllm.engines.tensorrt_llm.record.releases import RECORD

_SHARED: Mapping[str, str] = {
    "M121": "tensorrt_llm/ of 1.2.1, as its documentation renders it (`1.2.1/_modules`, exact)",
    "D121": "docs of 1.2.1, built from commit 376f7e1 (exact)",
    "M29": "tensorrt_llm/ of 1.3.0rc29, as its documentation renders it (`1.3.0rc29/_modules`, exact)",
    "D29": "docs of 1.3.0rc29, built from commit c76f4a8 (exact)",
    "D29t": "docs of 1.3.0rc29, developer-guide/telemetry: every captured field of TorchLlmArgs (exact)",
    "D27": "docs of 1.3.0rc27 (two releases before rc29)",
    "D141": "docs of 1.4.0rc1 (one release before 1.4.0rc2)",
    "D144": "docs of 1.4.0rc4 (two releases after 1.4.0rc2)",
    "P18232": "pull request 18232 of the library, merged 2026-08: sampler_type is removed",
    "S-args13": "tensorrt_llm/llmapi/llm_args.py, 1.3.0rc20 to rc24 (near)",
    "S-llm": "tensorrt_llm/llmapi/llm.py, late 1.3.0rc2x (near)",
    "S-llm12": "tensorrt_llm/llmapi/llm.py, about 1.2.0rc2 (near)",
    "S-res12": "tensorrt_llm/executor/result.py, about 1.2.0rc (near)",
    "S-exe12": "tensorrt_llm/executor/executor.py, about 1.2.0rc (near)",
    "S-ker": "tensorrt_llm/_torch/shared_tensor and tensorrt_llm/_utils, about 1.2 and 1.3.0rc (near)",
    "S-ids": "tensorrt_llm/llmapi/disagg_utils.py, late 1.3.0rc2x (near)",
    "S-qwen": "tensorrt_llm/_torch/models/modeling_qwen2vl.py and modeling_qwen3vl.py, late 1.3.0rc2x (near)",
    "V-qwen3": "tensorrt_llm/_torch/models/modeling_qwen3vl.py and modeling_qwen3vl_moe.py, as of pull "
    "request 15598 (2026-06) and of a later main (near; rc29 is of 2026-09)",
    "V-qwen2": "tensorrt_llm/_torch/models/modeling_qwen2vl.py, late 1.3.0rc2x (near)",
    "V-reg": "tensorrt_llm/inputs/registry.py, multimodal.py and multimodal_data.py, late 1.3.0rc2x and a "
    "later main (near)",
    "S-llava": "tensorrt_llm/_torch/models/modeling_llava_next.py, 1.2 (near)",
    "S-reg": "tensorrt_llm/inputs/registry.py, 1.2 and late 1.3.0rc2x (near)",
    "S-bw": "tensorrt_llm/executor/base_worker.py, about 1.2 and late 1.3.0rc (near)",
    "S-l4": "tensorrt_llm/_torch/models/modeling_llama.py, 1.1 to 1.3.0rc (near): its input processor "
    "attaches embeddings",
    "T-mm": "the library's own test of the standalone multimodal encoder, 1.3.0rc (near)",
    "T-lp": "the library's own tests of logprobs, 1.3.0rc (near)",
    "YC": "the library's api_stability references (stable set)",
    "dyn": "Dynamo 1.6.1's own component, which pins 1.3.0rc29: calls known to work",
    "inferred": "follows from what is written above, written nowhere",
}

SOURCES: Mapping[str, str] = {
    **_SHARED,
    **{key: where for release in RECORD.values() for key, where in release.read_in.items()},
}
