"""Small source trees of TensorRT-LLM, in the shapes of each recorded release, for the reader of the source.

Names, defaults, decorators and signatures are those of the library; bodies are cut down to what a reader
can see. Nothing of a tree can be imported: the package raises.
"""

from __future__ import annotations

from pathlib import Path

VERSIONS = ("1.2.1", "1.3.0rc29", "1.4.0rc2")

LLM_ARGS = """
import os
from enum import Enum
from typing import Annotated, Any, ClassVar, Dict, List, Literal, Optional, TypeAlias, Union

try:
    import ray
except ImportError:
    ray = None

from pydantic import BaseModel, Field as PydanticField, PrivateAttr, field_validator

from .block_reuse import BlockReuseConfig


def Field(default=..., *, status=None, telemetry=None, **kwargs):
    return PydanticField(default, **kwargs)


class StrictBaseModel(BaseModel):
    model_config = {"extra": "forbid"}


class CapacitySchedulerPolicy(str, Enum):
    MAX_UTILIZATION = "MAX_UTILIZATION"
    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"
    STATIC_BATCH = "STATIC_BATCH"


class LoadFormat(Enum):
    AUTO = 0
    DUMMY = 1
    VISION_ONLY = 2
    GMS = 3


class SchedulerConfig(StrictBaseModel, PybindMirror):
    capacity_scheduler_policy: CapacitySchedulerPolicy = Field(
        default=CapacitySchedulerPolicy.GUARANTEED_NO_EVICT, description="...")
    waiting_queue_policy: "Literal['fcfs', 'priority']" = "fcfs"


class DecodingBaseConfig(StrictBaseModel):
    max_draft_len: Optional[int] = None
    decoding_type: ClassVar[str] = "base"


class EagleDecodingConfig(DecodingBaseConfig):
    speculative_model: Optional[str] = None


class NGramDecodingConfig(DecodingBaseConfig):
    max_matching_ngram_size: int = 0


SpeculativeConfig: TypeAlias = Annotated[
    Union[EagleDecodingConfig, NGramDecodingConfig], Field(discriminator="x")]


@PybindMirror.mirror_pybind_fields(_KvCacheConfig)
class KvCacheConfig(StrictBaseModel, PybindMirror):
    enable_block_reuse: bool = Field(default=True, description="...")
    free_gpu_memory_fraction: Annotated[float | None, Ge(0)] = 0.9
    tokens_per_block: int = Field(default=32, description="...")
    block_reuse_config: BlockReuseConfig = Field(default_factory=BlockReuseConfig)
    use_kv_cache_manager_v2: bool | Literal["auto"] = "auto"

    @field_validator("free_gpu_memory_fraction")
    @classmethod
    def validate_fraction(cls, v):
        if not 0 <= v <= 1:
            raise ValueError("kv_cache_config.free_gpu_memory_fraction must be a float between 0 and 1")
        return v


@PybindMirror.mirror_pybind_fields(_CacheTransceiverConfig)
class CacheTransceiverConfig(StrictBaseModel, PybindMirror):
    backend: Optional[Literal["DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI"]] = Field(default=None)
    transceiver_runtime: Optional[Literal["CPP", "PYTHON", "auto"]] = Field(default="auto")
    max_tokens_in_buffer: Optional[int] = Field(default=None)
    kv_transfer_timeout_ms: Optional[PositiveInt] = Field(default=60000)


class BaseLlmArgs(StrictBaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    model: Union[str, Path] = Field(description="The path or name.")
    tokenizer_mode: Literal["auto", "slow"] = Field(default="auto", json_schema_extra={"type": "x"})
    kv_cache_config: KvCacheConfig = Field(default_factory=KvCacheConfig)
    scheduler_config: SchedulerConfig = Field(default_factory=SchedulerConfig, status="prototype")
    cache_transceiver_config: Optional[CacheTransceiverConfig] = Field(default=None, status="prototype")
    speculative_config: Optional[SpeculativeConfig] = Field(default=None)
    mpi_session: Optional[object] = Field(default=None, exclude=True, alias="_mpi_session")
    load_format: Literal["auto", "dummy"] = Field(default="auto")
    _parallel_config: Optional[object] = PrivateAttr(default=None)


class TorchLlmArgs(BaseLlmArgs):
    max_batch_size: Optional[int] = Field(default=2048, description="...")
    attn_backend: str = Field(default="TRTLLM", telemetry=TelemetryField.categorical("VANILLA", "TRTLLM"))
    load_format: Union[str, LoadFormat] = Field(default=LoadFormat.AUTO)
    _quant_config: Optional[QuantConfig] = PrivateAttr(default=None)

    @property
    def quant_config(self):
        return self._quant_config
"""
RUNTIME = '    transceiver_runtime: Optional[Literal["CPP", "PYTHON", "auto"]] = Field(default="auto")\n'
BLOCK_REUSE = """
class BlockReuseConfig(StrictBaseModel):
    policy: Literal["all_reusable", "per_request", "per_conversation"] = "all_reusable"
    max_num_turns: Annotated[int, Gt(gt=0)] = 1
"""
LLM = """
from ..executor import GenerationExecutor


class BaseLLM:

    def __init__(self, model, tokenizer=None, tokenizer_mode="auto", skip_tokenizer_init=False,
                 trust_remote_code=False, tensor_parallel_size=1, dtype="auto", revision=None,
                 tokenizer_revision=None, **kwargs) -> None:
        self._executor = None

    @nvtx_range_debug("LLM.generate_async", color="green", category="LLM")
    def generate_async(self, inputs, sampling_params=None, lora_request=None, prompt_adapter_request=None,
                       streaming: bool = False, kv_cache_retention_config=None, disaggregated_params=None,
                       trace_headers=None, _postproc_params=None, scheduling_params=None,
                       conversation_params=None, cache_salt=None, priority: float = 0.5) -> "RequestOutput":
        return self._executor.generate_async(inputs)

    @set_api_status("prototype")
    def preprocess(self, inputs, sampling_params=None, disaggregated_params=None):
        return inputs

    def generate(self, inputs, sampling_params=None, use_tqdm=True): ...
    def get_stats(self, timeout=2): ...
    def get_stats_async(self, timeout=2): ...
    def get_kv_cache_events(self, timeout=2): ...
    def get_kv_cache_events_async(self, timeout=2): ...
    def shutdown(self) -> None: ...

    def _check_health(self) -> bool:
        return self._executor.check_health()

    @property
    def llm_id(self): ...

    @property
    def tokenizer(self): ...


class _TorchLLM(BaseLLM):

    def encode(self, inputs): ...
    def get_kv_cache_capacity(self): ...
    def get_data_transceiver_state(self): ...

    @property
    def startup_metrics(self): ...

    @property
    def disaggregated_params(self): ...


class LLM(_TorchLLM):

    def __init__(self, model, tokenizer=None, tokenizer_mode="auto", skip_tokenizer_init=False,
                 trust_remote_code=False, tensor_parallel_size=1, dtype="auto", revision=None,
                 tokenizer_revision=None, **kwargs) -> None:
        super().__init__(model, tokenizer, **kwargs)
"""
MM_ENCODER = """
from .llm import BaseLLM, RequestOutput, _TorchLLM


class MultimodalEncoder(_TorchLLM):

    def __init__(self, model, trust_remote_code: bool = False, tensor_parallel_size: int = 1,
                 dtype: Literal["auto", "float16"] = "auto", **kwargs) -> None:
        super().__init__(model, **kwargs)

    def generate(self, inputs, sampling_params=None, *, use_tqdm: bool = True): ...

    def generate_async(self, inputs, sampling_params=None): ...
"""
DISAGG_UTILS = """
DISAGG_TIMESTAMP_BITS = 39
DISAGG_NODE_ID_BITS = 8
DISAGG_PROCESS_ID_BITS = 6


def get_global_disagg_request_id(node_id: int, process_id: int = 0) -> int:
    if node_id not in range(0, 1 << DISAGG_NODE_ID_BITS):
        raise ValueError("node_id must be in range")
"""
SAMPLING_PARAMS = """
@dataclass(slots=True, kw_only=True)
class GuidedDecodingParams:
    json: Optional[Union[str, BaseModel, dict]] = None
    regex: Optional[str] = None
    grammar: Optional[str] = None
    json_object: bool = False
    structural_tag: Optional[str] = None


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    end_id: Optional[int] = None
    pad_id: Optional[int] = None
    max_tokens: int = 32
    min_tokens: Optional[int] = None
    stop_token_ids: Optional[List[int]] = None
    ignore_eos: bool = False
    temperature: Optional[float] = None
    top_p: Optional[float] = None
    top_k: Optional[int] = None
    min_p: Optional[float] = None
    seed: Optional[int] = None
    repetition_penalty: Optional[float] = None
    presence_penalty: Optional[float] = None
    frequency_penalty: Optional[float] = None
    logprobs: Optional[int] = None
    logprobs_mode: LogprobMode = LogprobMode.RAW
    prompt_logprobs: Optional[int] = None
    guided_decoding: Optional[GuidedDecodingParams] = None
    detokenize: bool = True
    add_special_tokens: bool = True
    _stop_word_ids: Optional[List[List[int]]] = field(default=None, init=False, repr=False)
"""
DISAGGREGATED_PARAMS = """
@dataclass(slots=True, kw_only=True)
class DisaggregatedParams:
    request_type: Optional[str] = None
    first_gen_tokens: Optional[List[int]] = None
    ctx_request_id: Optional[int] = None
    opaque_state: Optional[bytes] = None
    draft_tokens: Optional[List[int]] = None
    disagg_request_id: Optional[int] = None
    ctx_info_endpoint: Optional[str] = None
    multimodal_embedding_handles: Optional[List[Dict[str, Any]]] = None
    multimodal_hashes: Optional[List[List[int]]] = None
    mrope_position_ids_handle: Optional[Dict[str, Any]] = None
    mrope_position_deltas_handle: Optional[Dict[str, Any]] = None
"""
RESULT = """
@dataclass(slots=True)
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: Optional[List[int]] = field(default_factory=list)
    logprobs: Optional[TokenLogprobs] = field(default_factory=list)
    finish_reason: Optional[Literal["stop", "length", "timeout", "cancelled"]] = None
    stop_reason: Optional[Union[int, str]] = None
    disaggregated_params: Optional[DisaggregatedParams] = None


class GenerationResultBase: ...


class GenerationResult(GenerationResultBase):

    def abort(self) -> None: ...
    async def aresult(self): ...
    def __aiter__(self): ...
    async def __anext__(self): ...
"""
BASE_WORKER = """
class BaseWorker(GenerationExecutor):

    def _enqueue_request(self, request):
        return tllm.Request(
            client_id=request.id,
            end_id=-1 if request.sampling_params.ignore_eos else request.sampling_params.end_id,
            stop_words=[] if request.sampling_params.ignore_eos else
            request.sampling_params._get_stop_words(),
        )
"""
EXECUTOR = """
class GenerationExecutor(ABC):

    def __init__(self):
        self._fatal_error = None

    def check_health(self) -> bool:
        return self._fatal_error is None

    def is_shutdown(self) -> bool: ...
"""
UTILS = """
class KVCacheEventSerializer:

    @staticmethod
    def _stored_to_json(data):
        return {"type": "stored", "parent_hash": data.parent_hash,
                "blocks": [{"block_hash": b.block_hash, "tokens": [{"token_id": t} for t in b.tokens]}]}

    @staticmethod
    def _removed_to_json(data):
        return {"type": "removed", "block_hashes": data.block_hashes}
"""
REGISTRY = """
class BaseMultimodalInputProcessor(ABC):

    supports_token_id_mm_expansion: ClassVar[bool] = False

    def attach_multimodal_embeddings(self, inputs, multimodal_embedding, sampling_params):
        raise NotImplementedError()


def support_multimodal_disaggregated(model_cls):
    processor_cls = INPUT_PROCESSOR_REGISTRY._input_processors_cls_by_model_type.get(model_cls)
    setattr(processor_cls, "support_mm_disagg", True)
    setattr(model_cls, "support_mm_disagg", True)
    return model_cls
"""
SHARED_TENSOR = """
class SharedTensorContainer:

    @classmethod
    def from_tensor(cls, tensor): ...

    @classmethod
    def from_dict(cls, tensor_info): ...

    def dump_to_dict(self): ...
    def get_local_view(self): ...
"""
QWEN = """
from ...inputs.registry import BaseMultimodalInputProcessor


class Qwen2VLInputProcessorBase(BaseMultimodalInputProcessor):

    def _preprocess(self, text, mm_data, mm_processor_kwargs):
        return self.processor(text=[text], images=mm_data.get("image"), **mm_processor_kwargs)


class Qwen2VLModelBase(PreTrainedModel):

    def __init__(self, model_config, *args, **kwargs):
        self.register_buffer('mrope_position_deltas_cache',
                             torch.zeros(max_mrope_delta_slots, dtype=torch.int32, device='cuda'),
                             persistent=False)


class Qwen2_5VLInputProcessorBase(Qwen2VLInputProcessorBase):

    def build_disagg_prefill_multimodal_inputs(self, inputs, mm_handles):
        text_prompt = inputs.get("prompt")
        if not text_prompt:
            raise ValueError("Text prompt is required but not provided")


@register_vision_encoder(Qwen2VisionModelBase, vlm_base_model=Qwen2VisionTransformerPretrainedModel)
@register_auto_model("Qwen2VLForConditionalGeneration")
@register_input_processor(
    Qwen2VLInputProcessorBase,
    model_type="qwen2_vl",
    placeholder_metadata=MultimodalPlaceholderMetadata(
        placeholder_map={
            "image": "<|vision_start|><|image_pad|><|vision_end|>",
            "video": "<|vision_start|><|video_pad|><|vision_end|>",
        },
        placeholder_placement=MultimodalPlaceholderPlacement.BEFORE_TEXT,
    ))
class Qwen2VLModel(Qwen2VLModelBase): ...


@support_multimodal_disaggregated
@register_auto_model("Qwen2_5_VLForConditionalGeneration")
@register_input_processor(
    Qwen2_5VLInputProcessorBase,
    model_type="qwen2_5_vl",
    placeholder_metadata=MultimodalPlaceholderMetadata(
        placeholder_map={"image": "<|vision_start|><|image_pad|><|vision_end|>"},
    ))
class Qwen2_5_VLModel(Qwen2VLModelBase): ...
"""
QWEN3 = """
from .modeling_qwen2vl import Qwen2VLInputProcessorBase


class Qwen3VLInputProcessorBase(Qwen2VLInputProcessorBase):

    def _preprocess(self, text, mm_data, mm_processor_kwargs):
        video_metadata = [dict(data.metadata, total_num_frames=len(data.frames)) for data in mm_data["video"]]
        proc_kwargs = {"do_sample_frames": _decide(mm_data, mm_processor_kwargs)}
        return self.processor(text=[text], video_metadata=video_metadata, **proc_kwargs)

    def get_num_tokens_per_video(self, *, video, video_grid_thw=None, **kwargs):
        return int(video_grid_thw.prod())

    def build_disagg_prefill_multimodal_inputs(self, inputs, mm_handles):
        return inputs.get("prompt")


@support_multimodal_disaggregated
@register_auto_model("Qwen3VLForConditionalGeneration")
@register_input_processor(
    Qwen3VLInputProcessorBase,
    model_type="qwen3_vl",
    placeholder_metadata=MultimodalPlaceholderMetadata(
        placeholder_map={
            "image": "<|vision_start|><|image_pad|><|vision_end|>",
            "video": "<|vision_start|><|video_pad|><|vision_end|>",
        },
    ))
class Qwen3VLModel(Qwen3VLModelBase): ...
"""
LLAVA = """
from ...inputs.registry import BaseMultimodalInputProcessor

_PLACEHOLDERS = MultimodalPlaceholderMetadata(placeholder_map={"image": "<image>"})


class LlavaNextInputProcessor(BaseMultimodalInputProcessor):

    supports_token_id_mm_expansion = True

    def attach_multimodal_embeddings(self, inputs, multimodal_embedding, sampling_params): ...

    def build_disagg_prefill_multimodal_inputs(self, inputs, mm_handles):
        return inputs["prompt"]


@support_multimodal_disaggregated
@register_auto_model("LlavaNextForConditionalGeneration")
@register_input_processor(
    LlavaNextInputProcessor, model_type="llava_next", placeholder_metadata=_PLACEHOLDERS)
class LlavaNextModel(PreTrainedModel): ...
"""
LLAMA = """
from ...inputs.registry import BaseMultimodalInputProcessor


class Llama4InputProcessor(BaseMultimodalInputProcessor):

    def attach_multimodal_embeddings(self, inputs, multimodal_embedding, sampling_params):
        mm_embedding_info = multimodal_embedding['image']
        mm_embeddings = [m['mm_embeddings'] for m in mm_embedding_info]
        special_tokens = [m['image_special_tokens'] for m in mm_embedding_info]
        special_offsets = [m['image_special_token_offsets'] for m in mm_embedding_info]
        return inputs["prompt"]


@register_vision_encoder(Llama4VisionEncoder)
@register_auto_model("Llama4ForConditionalGeneration")
@register_input_processor(
    Llama4InputProcessor,
    model_type="llama4",
    placeholder_metadata=MultimodalPlaceholderMetadata(placeholder_map={"image": "<|image|>"}))
class Llama4ForConditionalGeneration(SpecDecOneEngineForCausalLM): ...
"""
NOT_IMPORTABLE = 'raise ImportError("needs compiled parts")\n'

Files = dict[str, str]


def files_of(version: str) -> Files:
    """Files of a tree in the shape of `version`, by their paths in the package."""
    files = {
        "__init__.py": NOT_IMPORTABLE,
        "version.py": f'__version__ = "{version}"\n',
        "llmapi/__init__.py": NOT_IMPORTABLE,
        "llmapi/llm_args.py": LLM_ARGS,
        "llmapi/block_reuse.py": BLOCK_REUSE,
        "llmapi/llm.py": LLM,
        "llmapi/mm_encoder.py": MM_ENCODER,
        "llmapi/disagg_utils.py": DISAGG_UTILS,
        "sampling_params.py": SAMPLING_PARAMS,
        "disaggregated_params.py": DISAGGREGATED_PARAMS,
        "executor/result.py": RESULT,
        "executor/utils.py": "class RequestError(RuntimeError):\n    pass\n",
        "executor/executor.py": EXECUTOR,
        "executor/base_worker.py": BASE_WORKER,
        "_utils.py": UTILS,
        "inputs/registry.py": REGISTRY,
        "_torch/shared_tensor/__init__.py": "from .shared_tensor import SharedTensorContainer\n",
        "_torch/shared_tensor/shared_tensor.py": SHARED_TENSOR,
        "_torch/models/modeling_qwen2vl.py": QWEN,
        "_torch/models/modeling_qwen3vl.py": QWEN3,
        "_torch/models/modeling_llava_next.py": LLAVA,
        "_torch/models/modeling_llama.py": LLAMA,
    }
    if version.startswith("1.4"):
        change(files, "llmapi/llm_args.py", RUNTIME, RUNTIME.replace('default="auto"', 'default="PYTHON"'))
    if version.startswith("1.2"):
        _as_in_12(files)
    return files


def _as_in_12(files: Files) -> None:
    """No request ids, no `preprocess`, no fast path, C++ transceiver only, stop words stay under
    `ignore_eos`."""
    args = "llmapi/llm_args.py"
    change(files, args, RUNTIME, "")
    change(
        files,
        args,
        "    block_reuse_config: BlockReuseConfig = Field(default_factory=BlockReuseConfig)\n",
        "",
    )
    change(
        files,
        args,
        '    use_kv_cache_manager_v2: bool | Literal["auto"] = "auto"\n',
        "    onboard_blocks: bool = True\n",
    )
    change(files, args, "    GMS = 3\n", "")
    change(files, args, "default=60000", "default=None, gt=0")
    change(files, "llmapi/disagg_utils.py", DISAGG_UTILS, "class ServerRole: ...\n")
    change(files, "disaggregated_params.py", "    disagg_request_id: Optional[int] = None\n", "")
    change(files, "disaggregated_params.py", "    ctx_info_endpoint: Optional[str] = None\n", "")
    change(files, "inputs/registry.py", "    supports_token_id_mm_expansion: ClassVar[bool] = False\n", "")
    change(files, "_torch/models/modeling_llava_next.py", "    supports_token_id_mm_expansion = True\n", "")
    del files["_torch/models/modeling_qwen3vl.py"]
    for model in ("qwen2vl", "llava_next"):
        file = f"_torch/models/modeling_{model}.py"
        change(files, file, "build_disagg_prefill_multimodal_inputs", "get_prompt_token_ids")
    start, end = LLM.index('    @set_api_status("prototype")'), LLM.index("    def generate(self")
    change(files, "llmapi/llm.py", LLM[start:end], "")
    change(files, "llmapi/llm.py", "conversation_params=None, ", "")
    change(files, "llmapi/llm.py", ", priority: float = 0.5", "")
    change(files, "llmapi/llm.py", "self._executor.check_health()", "not self._executor.is_shutdown()")
    change(
        files,
        "executor/executor.py",
        EXECUTOR,
        "class GenerationExecutor(ABC):\n    def is_shutdown(self): ...\n",
    )
    change(
        files,
        "executor/base_worker.py",
        "[] if request.sampling_params.ignore_eos else\n            request",
        "request",
    )


def change(files: Files, path: str, old: str, new: str) -> None:
    """Replace `old`, which has to be there, in one file."""
    assert old in files[path], f"{path} has no {old!r}"
    files[path] = files[path].replace(old, new)


def write(folder: Path, files: Files) -> Path:
    """Write a tree below `folder` as a checkout has it; returns `folder`."""
    for path, text in files.items():
        file = folder / "tensorrt_llm" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder
