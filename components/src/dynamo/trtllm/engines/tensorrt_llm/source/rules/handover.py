"""Rules of the hand-over from prefill to decode: ids, parameters, handles, the cache transceiver."""

from __future__ import annotations

import ast

from dynamo.trtllm.engines.tensorrt_llm.record import REQUIRED
from dynamo.trtllm.engines.tensorrt_llm.source.facts import find_arguments
from dynamo.trtllm.engines.tensorrt_llm.source.fields import class_fields, parameters
from dynamo.trtllm.engines.tensorrt_llm.source.rules.rule import COMPLETE, Rule, in_all, lacking, since_13
from dynamo.trtllm.engines.tensorrt_llm.source.tree import Module, SourceTree

IDS_FILE = "llmapi/disagg_utils.py"
IDS_HELPER = "get_global_disagg_request_id"
_FIELDS = (
    "request_type", "first_gen_tokens", "ctx_request_id", "opaque_state", "multimodal_embedding_handles",
    "multimodal_hashes", "mrope_position_ids_handle", "mrope_position_deltas_handle",
)  # fmt: skip
_CONTAINER = ("from_tensor", "dump_to_dict", "from_dict", "get_local_view")
_NODE_BITS, _PROCESS_BITS = 8, 6
"""The adapter draws nodes below 256 and processes below 64."""


def _ids(tree: SourceTree) -> str | None:
    if tree.module(IDS_FILE) is None:
        return None
    params = tree.find("DisaggregatedParams", "disaggregated_params.py")
    helper = tree.find(IDS_HELPER, IDS_FILE)
    if helper is not None:
        found = parameters(helper)
        more = [name for name in list(found)[1:] if name != "process_id" and found[name] is REQUIRED]
        if more:
            return f"also wants {', '.join(more)}"
        return "node and process" if "process_id" in found else "one number" if found else "no number"
    needed = params is not None and "disagg_request_id" in class_fields(tree, params)
    return "no helper, though there is disagg_request_id" if needed else "none"


def _id_ranges(tree: SourceTree) -> str | None:
    module = tree.module(IDS_FILE)
    helper = tree.find(IDS_HELPER, IDS_FILE)
    if module is None:
        return None
    if helper is None or "process_id" not in parameters(helper):
        return "of one number"
    node, process = _bits(module, "NODE_ID_BITS"), _bits(module, "PROCESS_ID_BITS")
    if node is None or process is None:
        return None
    enough = node >= _NODE_BITS and process >= _PROCESS_BITS
    return "wide enough" if enough else f"{node} bits of node, {process} of process"


def _bits(module: Module, ending: str) -> int | None:
    for node in module.body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id.endswith(ending)
        ):
            value = node.value
            return value.value if isinstance(value, ast.Constant) and isinstance(value.value, int) else None
    return None


def _fields(tree: SourceTree) -> str | None:
    found = tree.find("DisaggregatedParams", "disaggregated_params.py")
    return lacking(_FIELDS, class_fields(tree, found)) if found is not None else None


def _handles(tree: SourceTree) -> str | None:
    found = tree.find("SharedTensorContainer", "_torch/shared_tensor/__init__.py", "_torch/shared_tensor.py")
    if found is None:
        return None
    return lacking(_CONTAINER, [name for name in _CONTAINER if tree.method(found, name) is not None])


def _transceiver(tree: SourceTree) -> str | None:
    """The runtime that moves KV caches when the configuration does not say which."""
    arguments = find_arguments(tree)
    section = class_fields(tree, arguments).get("cache_transceiver_config") if arguments is not None else None
    if section is None or section.configuration is None:
        return None
    runtime = class_fields(tree, section.configuration).get("transceiver_runtime")
    return "C++ only" if runtime is None else str(runtime.default)


RULES = (
    Rule(
        name="request-ids",
        relies=f"{IDS_HELPER} takes one number, or a node and a process",
        file=IDS_FILE,
        seen="parameters of the function, and whether DisaggregatedParams has disagg_request_id",
        breaks="prefill answers every request with a 500",
        accepted=("node and process", "one number", "none"),
        look=_ids,
        expected=since_13("none", "node and process"),
        source="S-ids, M121",
    ),
    Rule(
        name="request-id-ranges",
        relies="nodes below 256 and processes below 64 fit into a request id",
        file=IDS_FILE,
        seen="the constants ...NODE_ID_BITS and ...PROCESS_ID_BITS",
        breaks="prefill workers with a larger number answer every request with a 500",
        accepted=("wide enough", "of one number"),
        look=_id_ranges,
        expected=since_13("of one number", "wide enough"),
        source="S-ids",
    ),
    Rule(
        name="disaggregated-fields",
        relies="DisaggregatedParams has " + ", ".join(_FIELDS),
        file="disaggregated_params.py",
        seen="fields of the dataclass DisaggregatedParams",
        breaks="decode cannot continue what prefill began, or images are lost on the way",
        accepted=(COMPLETE,),
        look=_fields,
        expected=in_all(COMPLETE),
        source="M121, M29",
    ),
    Rule(
        name="tensor-handles",
        relies="SharedTensorContainer makes and opens handles of tensors: " + ", ".join(_CONTAINER),
        file="_torch/shared_tensor/",
        seen="methods of the class SharedTensorContainer",
        breaks="no embeddings from an encode worker, no disaggregated images with Qwen models",
        accepted=(COMPLETE,),
        look=_handles,
        expected=in_all(COMPLETE),
        source="S-ker",
    ),
    Rule(
        name="transceiver-runtime",
        relies="the runtime that moves KV caches by default is known: the Python one takes NIXL or DEFAULT "
        "only",
        file="llmapi/llm_args.py",
        seen="default of CacheTransceiverConfig.transceiver_runtime",
        breaks="configurations with UCX do not start where the Python runtime is chosen",
        accepted=("C++ only", "None", "CPP", "auto", "PYTHON"),
        look=_transceiver,
        expected={"1.2.1": "C++ only", "1.3.0rc29": "auto", "1.4.0rc2": "PYTHON"},
        source="M121, D27, D141, D144",
    ),
)
