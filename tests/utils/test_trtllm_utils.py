from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dynamo.trtllm.config import EngineKind, Modality, Role, WorkerConfig
from dynamo.trtllm.errors import StartupError
from dynamo.trtllm.invocation import CheckOptions
from dynamo.trtllm.utils.flags import FLAGS
from dynamo.trtllm.utils.trtllm_utils import dump_engine_args, parse, parse_args, write_config

MIB = 1 << 20
LONG = "a" * 5000
NO_DUMP = "the file of --dump-config-to cannot be written: give a path in a directory that exists"
PREFILL = ["--disaggregation-mode", "prefill"]
DECODE = ["--disaggregation-mode", "decode"]
ENCODE = ["--disaggregation-mode", "encode"]
WITH_ENCODER = ["--modality", "multimodal", "--encode-endpoint", "dyn://dynamo.tensorrt_llm_encode.generate"]


def refusal(arguments: list[str]) -> str:
    with pytest.raises(StartupError) as caught:
        parse(arguments)
    return caught.value.message


def test_defaults_are_those_of_the_configuration() -> None:
    config = parse_args([])
    assert config.role is Role.AGGREGATED
    assert config.runtime.endpoint == "dyn://dynamo.tensorrt_llm.generate"
    assert config.engine.kind is EngineKind.TENSORRT_LLM
    assert config.media.max_file_bytes == 50 * MIB
    assert config.media.allowed_local_path == Path("/tmp")
    assert not config.media.local_files
    assert config.engine.args == {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "kv_cache_config": {"tokens_per_block": 32, "free_gpu_memory_fraction": 0.9},
    }
    assert set(config.engine.origins.values()) == {"default"}

KINDS = ("image", "video", "audio")


FIELDS: list[tuple[list[str], Callable[[WorkerConfig], Any], Any]] = [
    (["--model-path", "m"], lambda c: (c.model.path, c.model.name, c.engine.model_path), ("m", "m", "m")),
    (["--model", "m"], lambda c: c.model.path, "m"),
    (
        ["--served-model-name", "a, b c"],
        lambda c: (c.model.served_names, c.model.name),
        (("a", "b", "c"), "a"),
    ),
    (["--served-model-name", ""], lambda c: c.model.served_names, ()),
    (
        ["--modality", "multimodal"],
        lambda c: (c.model.modality, c.engine.modality),
        (Modality.MULTIMODAL,) * 2,
    ),
    (["--enable-multimodal"], lambda c: c.model.modality, Modality.MULTIMODAL),
    (["--enable-multimodal", "--modality", "multimodal"], lambda c: c.model.modality, Modality.MULTIMODAL),
    (["--disaggregation-mode", "prefill_and_decode"], lambda c: c.role, Role.AGGREGATED),
    (["--disaggregation-mode", "pd"], lambda c: c.role, Role.AGGREGATED),
    (["--disaggregation-mode", "agg"], lambda c: (c.role, c.engine.role), (Role.AGGREGATED, Role.AGGREGATED)),
    (PREFILL, lambda c: (c.role, c.runtime.endpoint), (Role.PREFILL, "dyn://dynamo.prefill.generate")),
    (DECODE, lambda c: (c.role, c.runtime.endpoint), (Role.DECODE, "dyn://dynamo.tensorrt_llm.generate")),
    (
        ENCODE,
        lambda c: (c.runtime.endpoint, c.model.modality),
        ("dyn://dynamo.tensorrt_llm_encode.generate", Modality.MULTIMODAL),
    ),
    (
        ["--namespace", "n"],
        lambda c: (c.runtime.namespace, c.runtime.endpoint),
        ("n", "dyn://n.tensorrt_llm.generate"),
    ),
    (["--endpoint", "x.y.z"], lambda c: (c.runtime.namespace, c.runtime.endpoint), ("x", "dyn://x.y.z")),
    (WITH_ENCODER, lambda c: c.peers.encode_endpoint, "dyn://dynamo.tensorrt_llm_encode.generate"),
    ([*WITH_ENCODER, *PREFILL, "--encode-fallback"], lambda c: c.peers.encode_fallback, True),
    ([*WITH_ENCODER, "--peer-timeout", "5"], lambda c: c.peers.timeout_s, 5.0),
    ([*DECODE, "--peer-timeout", "5"], lambda c: c.peers.timeout_s, 5.0),
    ([*DECODE, "--namespace", "n"], lambda c: c.peers.prefill_endpoint, "dyn://n.prefill.generate"),
    ([*DECODE, "--endpoint", "x.y.z"], lambda c: c.peers.prefill_endpoint, "dyn://x.prefill.generate"),
    ([*DECODE, "--prefill-endpoint", "a.b.c"], lambda c: c.peers.prefill_endpoint, "dyn://a.b.c"),
    ([*WITH_ENCODER, "--transfer-pool-mb", "8"], lambda c: c.transfer.pool_bytes, 8 * MIB),
    ([*DECODE, "--transfer-ttl", "2.5"], lambda c: c.transfer.time_to_live_s, 2.5),
    ([*DECODE, "--transfer-through-host"], lambda c: c.transfer.through_host, True),
    (
        ["--engine", "transformers", "--device", "cuda:1"],
        lambda c: (c.engine.kind.value, c.engine.device),
        ("transformers", "cuda:1"),
    ),
    (["--engine", "transformers", "--torch-threads", "3"], lambda c: c.engine.torch_threads, 3),
    (
        ["--publish-events-and-metrics"],
        lambda c: (c.engine.publish_kv_events, c.engine.publish_metrics),
        (True, True),
    ),
    (["--publish-metrics"], lambda c: (c.engine.publish_kv_events, c.engine.publish_metrics), (False, True)),
    (
        ["--publish-kv-events"],
        lambda c: (c.engine.publish_kv_events, c.engine.publish_metrics),
        (True, False),
    ),
    (
        ["--allowed-local-media-path", "/"],
        lambda c: (c.media.allowed_local_path, c.media.local_files),
        (Path("/"), True),
    ),
    (["--max-file-size-mb", "2"], lambda c: c.media.max_file_bytes, 2 * MIB),
    (["--max-file-size-mb", "500"], lambda c: c.media.max_request_bytes, 500 * MIB),
    (["--max-images", "3"], lambda c: c.media.max_images, 3),
    (["--limit-mm-per-prompt", "image=3,video=0"], lambda c: [c.media.limit_of(k) for k in KINDS], [3, 0, 1]),
    (["--limit-mm-per-prompt", "video=2"], lambda c: [c.media.limit_of(k) for k in KINDS], [16, 2, 1]),
    (["--limit-mm-per-prompt", "image=4", "--max-images", "9"], lambda c: c.media.limit_of("image"), 4),
    (["--limit-mm-per-prompt", "video=4", "--max-images", "9"], lambda c: c.media.limit_of("image"), 9),
    (
        ["--limit-mm-per-prompt", '{"image": 2, "audio": {"count": 5}}'],
        lambda c: dict(c.media.limits),
        {"image": 2, "audio": 5},
    ),
    (
        ["--allowed-media-domains", "Example.com., *.b.org 10.0.0.1,[::1]"],
        lambda c: c.media.allowed_hosts,
        ("example.com", "*.b.org", "10.0.0.1", "[::1]"),
    ),
    (["--max-image-pixels", "1000"], lambda c: c.media.max_image_pixels, 1000),
    (["--max-video-duration", "90"], lambda c: c.media.video.max_duration_s, 90.0),
    (["--max-video-frames", "16"], lambda c: c.media.video.max_frames, 16),
    (["--max-video-frame-pixels", "1000"], lambda c: c.media.video.max_frame_pixels, 1000),
    (["--max-video-pixels", "5000"], lambda c: c.media.video.max_pixels, 5000),
    (["--video-decode-timeout", "7"], lambda c: c.media.video.decode_timeout_s, 7.0),
    (["--max-audio-duration", "12"], lambda c: c.media.audio.max_duration_s, 12.0),
    (["--audio-decode-timeout", "3"], lambda c: c.media.audio.decode_timeout_s, 3.0),
    (["--max-request-media-mb", "60"], lambda c: c.media.max_request_bytes, 60 * MIB),
    (["--image-decode-timeout", "2.5"], lambda c: c.media.decode_timeout_s, 2.5),
    (["--media-fetch-timeout", "0.5"], lambda c: c.media.fetch_timeout_s, 0.5),
    (["--max-media-fetches", "2"], lambda c: c.media.max_fetches, 2),
    (["--max-media-fetches", "2"], lambda c: c.media.fetches_per_host, 1),
    (
        ["--max-media-fetches-per-host", "3"],
        lambda c: (c.media.fetches_per_host, c.media.max_fetches),
        (3, 64),
    ),
    (["--media-cache-mb", "0"], lambda c: c.media.cache_bytes, 0),
    (["--multimodal-embedding-cache-capacity-gb", "1"], lambda c: c.media.cache_bytes, 1 << 30),
    (["--discovery-backend", "file"], lambda c: c.runtime.discovery_backend, "file"),
    (["--store-kv", "file"], lambda c: c.runtime.discovery_backend, "file"),
    (["--request-plane", "nats"], lambda c: c.runtime.request_plane, "nats"),
    (["--event-plane", "zmq"], lambda c: c.runtime.event_plane, "zmq"),
    (["--response-plane", "quic"], lambda c: c.runtime.response_plane, "quic"),
    (["--endpoint-types", "chat"], lambda c: c.runtime.endpoint_types, ("chat",)),
    (
        ["--dyn-endpoint-types", "completions,chat"],
        lambda c: c.runtime.endpoint_types,
        ("completions", "chat"),
    ),
    (["--endpoint-types", "none"], lambda c: c.runtime.endpoint_types, ()),
    (["--enable-local-indexer", "false"], lambda c: c.runtime.enable_local_indexer, False),
    (["--dyn-tool-call-parser", "hermes"], lambda c: c.model.tool_call_parser, "hermes"),
    (["--dyn-reasoning-parser", "qwen3"], lambda c: c.model.reasoning_parser, "qwen3"),
    (["--dyn-default-thinking-mode", "disabled"], lambda c: c.runtime.default_thinking_mode, "disabled"),
    (["--dyn-structural-tag", "false"], lambda c: c.runtime.structural_tag, None),
    (
        ["--health-check-payload", '{"token_ids": [1]}'],
        lambda c: c.runtime.health_check_payload,
        {"token_ids": [1]},
    ),
    (["--kv-state-endpoint", "a.b.c"], lambda c: c.runtime.kv_state_endpoint, "a.b.c"),
    (["--dump-config-to", "f"], lambda c: c.runtime.dump_config_to, "f"),
    (["--use-nixl-connect", "--migration-limit", "3"], lambda c: c.role, Role.AGGREGATED),
]


@pytest.mark.parametrize(("arguments", "field", "value"), FIELDS, ids=[" ".join(case[0]) for case in FIELDS])
def test_each_flag_lands_in_its_field(
    arguments: list[str], field: Callable[[WorkerConfig], Any], value: object
) -> None:
    assert field(parse_args(arguments)) == value


ENGINE_ARGS = [
    ("--tensor-parallel-size", "8", "tensor_parallel_size", 8),
    ("--pipeline-parallel-size", "2", "pipeline_parallel_size", 2),
    ("--expert-parallel-size", "4", "moe_expert_parallel_size", 4),
    ("--gpus-per-node", "4", "gpus_per_node", 4),
    ("--kv-block-size", "64", "kv_cache_config.tokens_per_block", 64),
    ("--free-gpu-memory-fraction", "0.5", "kv_cache_config.free_gpu_memory_fraction", 0.5),
    ("--max-batch-size", "16", "max_batch_size", 16),
    ("--max-num-tokens", "4096", "max_num_tokens", 4096),
    ("--max-seq-len", "2048", "max_seq_len", 2048),
    ("--max-beam-width", "2", "max_beam_width", 2),
    ("--dtype", "bfloat16", "dtype", "bfloat16"),
    ("--load-format", "dummy", "load_format", "dummy"),
    ("--guided-decoding-backend", "xgrammar", "guided_decoding_backend", "xgrammar"),
]


def engine_arg(config: WorkerConfig, dotted: str) -> Any:
    value: Any = config.engine.args
    for key in dotted.split("."):
        value = value[key]
    return value


@pytest.mark.parametrize(("flag", "text", "dotted", "value"), ENGINE_ARGS)
def test_each_engine_flag_and_its_variable_land_under_tensorrt_llms_name(
    flag: str, text: str, dotted: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parse_args([flag, text])
    assert (engine_arg(config, dotted), config.engine.origins[dotted]) == (value, flag)
    variable = "DYN_TRTLLM_" + flag[2:].upper().replace("-", "_")
    monkeypatch.setenv(variable, text)
    config = parse_args([])
    assert (engine_arg(config, dotted), config.engine.origins[dotted]) == (value, variable)


def test_switches_among_the_engine_arguments_have_a_negative_form() -> None:
    assert parse_args(["--enable-attention-dp"]).engine.args["enable_attention_dp"] is True
    config = parse_args(["--no-enable-attention-dp", "--trust-remote-code"])
    assert (config.engine.args["enable_attention_dp"], config.engine.args["trust_remote_code"]) == (
        False,
        True,
    )


def test_the_five_sources_of_engine_arguments_win_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "agg.yaml"
    path.write_text("kv_cache_config:\n  free_gpu_memory_fraction: 0.2\n  enable_block_reuse: false\n")
    name = "kv_cache_config.free_gpu_memory_fraction"

    def outcome(*arguments: str) -> tuple[float, str]:
        config = parse_args(list(arguments))
        return engine_arg(config, name), config.engine.origins[name]

    assert outcome() == (0.9, "default")
    file = ["--extra-engine-args", str(path)]
    assert outcome(*file) == (0.2, "file agg.yaml")
    monkeypatch.setenv("DYN_TRTLLM_FREE_GPU_MEMORY_FRACTION", "0.3")
    assert outcome(*file) == (0.3, "DYN_TRTLLM_FREE_GPU_MEMORY_FRACTION")
    flag = ["--free-gpu-memory-fraction", "0.4"]
    assert outcome(*file, *flag) == (0.4, "--free-gpu-memory-fraction")
    override = ["--override-engine-args", '{"kv_cache_config": {"free_gpu_memory_fraction": 0.6}}']
    assert outcome(*file, *flag, *override) == (0.6, "override")
    assert outcome(*file, *flag, f"--trtllm.{name}", "0.7") == (0.7, f"--trtllm.{name}")
    config = parse_args([*file, *flag, *override])
    assert config.engine.args["kv_cache_config"] == {
        "tokens_per_block": 32,
        "free_gpu_memory_fraction": 0.6,
        "enable_block_reuse": False,
    }
    assert dump_engine_args(config.engine).splitlines()[:3] == [
        "kv_cache_config.enable_block_reuse = false  (file agg.yaml)",
        "kv_cache_config.free_gpu_memory_fraction = 0.6  (override)",
        "kv_cache_config.tokens_per_block = 32  (default)",
    ]


def test_a_file_is_found_from_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.yaml").write_text("max_batch_size: 7\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DYN_TRTLLM_EXTRA_ENGINE_ARGS", "x.yaml")
    assert parse_args([]).engine.args["max_batch_size"] == 7


@pytest.mark.parametrize(
    ("plain", "text", "field", "value"),
    [
        ("MODEL_PATH", "m", lambda c: c.model.path, "m"),
        ("SERVED_MODEL_NAME", "n", lambda c: c.model.name, "n"),
        ("MODALITY", "multimodal", lambda c: c.model.modality, Modality.MULTIMODAL),
        (
            "ALLOWED_LOCAL_MEDIA_PATH",
            "/",
            lambda c: (c.media.allowed_local_path, c.media.local_files),
            (Path("/"), True),
        ),
        ("MAX_FILE_SIZE_MB", "7", lambda c: c.media.max_file_bytes, 7 * MIB),
    ],
)
def test_the_guides_plain_variables_are_a_fallback(
    plain: str,
    text: str,
    field: Callable[[WorkerConfig], Any],
    value: object,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(plain, text)
    assert field(parse_args([])) == value


def test_prefixed_variables_beat_plain_ones_and_flags_beat_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_PATH", "plain")
    assert parse_args([]).model.path == "plain"
    monkeypatch.setenv("DYN_TRTLLM_MODEL", "newer")
    assert parse_args([]).model.path == "newer"
    monkeypatch.setenv("DYN_TRTLLM_MODEL_PATH", "own")
    assert parse_args([]).model.path == "own"
    assert parse_args(["--model", "flag"]).model.path == "flag"
    monkeypatch.setenv("DYN_TRTLLM_MODEL_PATH", "")
    assert parse_args([]).model.path == "newer"


def test_a_stronger_source_settles_what_two_names_of_one_thing_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODALITY", "multimodal")
    assert parse_args(["--no-enable-multimodal"]).model.modality is Modality.TEXT
    monkeypatch.setenv("DYN_TRTLLM_PUBLISH_EVENTS_AND_METRICS", "1")
    config = parse_args(["--no-publish-kv-events"])
    assert (config.engine.publish_kv_events, config.engine.publish_metrics) == (False, True)


@pytest.mark.parametrize("role", ["decode", "encode"])
def test_a_plain_variable_that_a_role_has_no_use_for_is_ignored(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENCODE_ENDPOINT", "nonsense")
    invocation = parse(["--disaggregation-mode", role])
    assert (invocation.config.peers.encode_endpoint, invocation.notes) == (None, ())


def test_a_prefixed_variable_that_a_role_has_no_use_for_is_ignored_with_a_note(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DYN_TRTLLM_ENCODE_ENDPOINT", "dynamo.encode.generate")
    assert parse(DECODE).notes == (
        "a decode worker has no use for DYN_TRTLLM_ENCODE_ENDPOINT, so it is ignored",
    )
    assert parse([]).notes == ("a text worker has no use for DYN_TRTLLM_ENCODE_ENDPOINT, so it is ignored",)
    multimodal = parse(["--modality", "multimodal"])
    assert (multimodal.config.peers.encode_endpoint, multimodal.notes) == ("dyn://dynamo.encode.generate", ())


def test_a_misspelled_variable_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_TRTLLM_MAX_BATCHSIZE", "3")
    assert parse([]).notes == ("DYN_TRTLLM_MAX_BATCHSIZE is not a variable of this worker, so it is ignored",)


def test_flags_that_do_nothing_any_more_are_noted() -> None:
    notes = parse(["--use-nixl-connect", "--migration-limit", "2"]).notes
    assert [note.partition(" is deprecated: ")[0] for note in notes] == [
        "--use-nixl-connect",
        "--migration-limit",
    ]


def test_media_flags_on_a_text_worker_are_noted() -> None:
    assert parse(["--max-images", "2", "--model-path", "m"]).notes == (
        "--max-images has no effect on a text worker: --modality multimodal would serve media",
    )


def test_other_variables_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_args([])
    assert (config.media.allow_internal, config.runtime.pushes_chunks) == (False, True)
    monkeypatch.setenv("DYN_MM_ALLOW_INTERNAL", "1")
    monkeypatch.setenv("DYN_TRTLLM_PULL_EGRESS", "1")
    monkeypatch.setenv("DYN_STORE_KV", "mem")
    monkeypatch.setenv("DYN_NAMESPACE", "a")
    monkeypatch.setenv("DYN_NAMESPACE_WORKER_SUFFIX", "b")
    monkeypatch.setenv("DYN_LOCAL_INDEXER", "false")
    invocation = parse([])
    config = invocation.config
    assert (config.media.allow_internal, config.runtime.pushes_chunks) == (True, False)
    assert (config.runtime.discovery_backend, config.runtime.endpoint) == (
        "mem",
        "dyn://a-b.tensorrt_llm.generate",
    )
    assert (config.runtime.enable_local_indexer, invocation.notes) == (False, ())


@pytest.mark.parametrize(
    ("backend", "variables", "expected"),
    [
        ("file", {}, True),
        ("mem", {}, True),
        ("etcd", {}, False),
        ("etcd", {"DYN_SYSTEM_PORT": "-1"}, False),
        ("etcd", {"DYN_SYSTEM_PORT": "9090"}, True),
        ("kubernetes", {"DYN_SYSTEM_PORT": "9090"}, True),
        ("etcd", {"DYN_SYSTEM_PORT": "9090", "DYN_SELF_HOST_METADATA": "false"}, False),
    ],
)
def test_a_frontend_gets_a_workers_files_on_one_machine_or_from_its_status_port(
    backend: str, variables: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DYN_SYSTEM_PORT", "DYN_SELF_HOST_METADATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert parse_args(["--discovery-backend", backend]).runtime.hands_files_over is expected


RUST_SIDE = [
    (["--engine-request-limit", "9"], {"DYN_ENGINE_REQUEST_LIMIT": "9"}),
    (["--response-plane", "quic"], {"DYN_RESPONSE_PLANE": "quic"}),
    (
        ["--tcp-tls-cert-path", "/c", "--tcp-tls-key-path", "/k"],
        {"DYN_TCP_TLS_CERT_PATH": "/c", "DYN_TCP_TLS_KEY_PATH": "/k"},
    ),
    (["--nats-tls-ca-cert-path", "/ca"], {"NATS_TLS_CA_CERT_PATH": "/ca"}),
]


@pytest.mark.parametrize(("arguments", "wanted"), RUST_SIDE, ids=[case[0][0] for case in RUST_SIDE])
def test_parsing_leaves_the_environment_as_it_is_and_names_what_dynamos_rust_side_is_to_find_there(
    arguments: list[str], wanted: dict[str, str]
) -> None:
    before = dict(os.environ)
    config = parse_args([*arguments, "--health-check-payload", '{"token_ids": [7]}'])
    assert dict(os.environ) == before
    assert {**config.runtime.environment, **wanted} == config.runtime.environment
    assert config.runtime.health_check_payload == {"token_ids": [7]}


def test_a_variable_that_a_flag_turns_off_is_named_to_be_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_TCP_TLS_INSECURE", "true")
    config = parse_args(["--no-tcp-tls-insecure"])
    assert (config.runtime.environment["DYN_TCP_TLS_INSECURE"], os.environ["DYN_TCP_TLS_INSECURE"]) == (
        None,
        "true",
    )


def test_the_configuration_is_written_where_it_was_asked_for(tmp_path: Path) -> None:
    write_config(parse_args([]))
    path = tmp_path / "config.json"
    write_config(parse_args(["--dump-config-to", str(path), "--max-batch-size", "3", "--model-path", "m"]))
    written = json.loads(path.read_text())
    assert (written["model"]["path"], written["role"], written["engine"]["args"]["max_batch_size"]) == (
        "m",
        "agg",
        3,
    )
    with pytest.raises(StartupError, match=r"^the file of --dump-config-to cannot be written"):
        write_config(parse_args(["--dump-config-to", str(tmp_path / "none" / "config.json")]))


def test_a_script_for_the_double_is_no_engine_argument() -> None:
    config = parse_args(
        ["--engine", "double", "--override-engine-args", '{"double": {"delay_s": 1}, "max_batch_size": 2}']
    )
    assert config.engine.double_script == {"delay_s": 1}
    assert "double" not in config.engine.args
    assert config.engine.args["max_batch_size"] == 2


def test_check_options_are_read_beside_the_configuration(tmp_path: Path) -> None:
    assert parse([]).check is None
    assert parse(["--check"]).check == CheckOptions()
    arguments = [
        *PREFILL,
        "--check",
        "--against",
        str(tmp_path / "d.yaml"),
        "--engine-report",
        "--live",
        "--gpu-memory-gb",
        "80",
    ]
    assert parse(arguments).check == CheckOptions(
        against=tmp_path / "d.yaml", engine_report=True, live=True, gpu_memory_gb=80.0
    )


def test_a_jinja_template_is_expanded_and_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.jinja").write_text("x")
    monkeypatch.setenv("TEMPLATES", str(tmp_path))
    assert parse_args(["--custom-jinja-template", "$TEMPLATES/t.jinja"]).model.custom_jinja_template == str(
        tmp_path / "t.jinja"
    )


CONTRADICTIONS = [
    (
        ["--model", "a", "--model-path", "b"],
        "--model and --model-path contradict each other: keep one of them",
    ),
    (
        ["--trust-remote-code", "--no-trust-remote-code"],
        "--trust-remote-code and --no-trust-remote-code contradict each other: keep one of them",
    ),
    (
        ["--enable-multimodal", "--modality", "text"],
        "--modality and --enable-multimodal contradict each other: keep one of them",
    ),
    (
        ["--no-enable-multimodal", "--modality", "multimodal"],
        "--modality and --no-enable-multimodal contradict each other: keep one of them",
    ),
    (
        ["--publish-events-and-metrics", "--no-publish-metrics"],
        "--no-publish-metrics and --publish-events-and-metrics contradict each other: keep one of them",
    ),
    (
        ["--trtllm.max_batch_size", "2", "--override-engine-args", '{"max_batch_size": 3}'],
        (
            "--override-engine-args and --trtllm.max_batch_size exclude each other: "
            "write all overrides in one of the two ways"
        ),
    ),
    (
        ["--max-file-size-mb", "60", "--max-request-media-mb", "40"],
        "--max-request-media-mb is below --max-file-size-mb: raise it to at least 60",
    ),
    (
        ["--max-request-media-mb", "40"],
        "--max-request-media-mb is below the default of --max-file-size-mb: raise it to at least 50",
    ),
    (
        ["--multimodal-embedding-cache-capacity-gb", "1", "--media-cache-mb", "5"],
        "--multimodal-embedding-cache-capacity-gb and --media-cache-mb are the same: keep one of them",
    ),
    (
        ["--store-kv", "etcd", "--discovery-backend", "file"],
        "--store-kv and --discovery-backend contradict each other: keep --discovery-backend",
    ),
    (["--against", "x.yaml"], "--against is of no use without --check: add that, or remove it"),
    (["--live"], "--live is of no use without --check: add that, or remove it"),
]


@pytest.mark.parametrize(
    ("arguments", "sentence"), CONTRADICTIONS, ids=[" ".join(case[0]) for case in CONTRADICTIONS]
)
def test_flags_that_contradict_each_other_end_the_start(arguments: list[str], sentence: str) -> None:
    assert refusal(arguments) == sentence


USELESS = [
    (DECODE, "--encode-endpoint", "a.b.c", "a decode worker"),
    (ENCODE, "--encode-endpoint", "a.b.c", "an encode worker"),
    (DECODE, "--allowed-local-media-path", "/tmp", "a decode worker"),
    (DECODE, "--max-file-size-mb", "5", "a decode worker"),
    (DECODE, "--max-images", "5", "a decode worker"),
    (DECODE, "--media-cache-mb", "5", "a decode worker"),
    (PREFILL, "--prefill-endpoint", "a.b.c", "a prefill worker"),
    (ENCODE, "--peer-timeout", "5", "an encode worker"),
    (ENCODE, "--kv-block-size", "5", "an encode worker"),
    (ENCODE, "--max-seq-len", "5", "an encode worker"),
    ([], "--peer-timeout", "3", "a worker without --encode-endpoint"),
    ([], "--encode-endpoint", "a.b.c", "a text worker"),
    ([], "--transfer-pool-mb", "5", "an aggregated worker without --encode-endpoint"),
    ([], "--transfer-ttl", "5", "an aggregated worker without --encode-endpoint"),
]


@pytest.mark.parametrize(("role", "flag", "text", "who"), USELESS)
def test_a_flag_that_a_role_has_no_use_for_is_ignored_with_a_note_and_changes_nothing(
    role: list[str], flag: str, text: str, who: str
) -> None:
    invocation = parse([*role, flag, text])
    assert invocation.notes == (f"{who} has no use for {flag}, so it is ignored",)
    before, after = parse(role).config, invocation.config
    assert (after.peers, after.media, after.engine) == (before.peers, before.media, before.engine)


@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        (
            ["--encode-fallback"],
            "a worker without --encode-endpoint has no use for --encode-fallback, so it is ignored",
        ),
        (
            ["--transfer-through-host"],
            (
                "an aggregated worker without --encode-endpoint has no use "
                "for --transfer-through-host, so it is ignored"
            ),
        ),
        (
            [*ENCODE, "--modality", "text"],
            "an encode worker is multimodal by itself, so --modality is ignored",
        ),
        (
            [*ENCODE, "--publish-kv-events"],
            "an encode worker has no use for --publish-kv-events, so it is ignored",
        ),
        (
            [*DECODE, "--encode-fallback"],
            "a decode worker has no use for --encode-fallback, so it is ignored",
        ),
    ],
)
def test_a_switch_that_a_role_has_no_use_for_is_ignored_with_a_note(arguments: list[str], note: str) -> None:
    assert note in parse(arguments).notes


def test_with_an_encoder_its_flags_are_used_and_nothing_is_noted() -> None:
    invocation = parse([*WITH_ENCODER, "--transfer-pool-mb", "5", "--encode-fallback", "--peer-timeout", "3"])
    assert invocation.notes == ()
    assert (invocation.config.peers.encode_fallback, invocation.config.peers.timeout_s) == (True, 3.0)
    assert invocation.config.transfer.pool_bytes == 5 << 20


@pytest.mark.parametrize(
    ("engine", "flag", "text"), [("tensorrt_llm", "--device", "cpu"), ("double", "--torch-threads", "1")]
)
def test_a_flag_of_another_engine_ends_the_start(engine: str, flag: str, text: str) -> None:
    assert refusal(["--engine", engine, flag, text]).startswith(
        f"--engine {engine} has no use for {flag}, which is for"
    )


@pytest.mark.parametrize("variable", ["DYN_SYSTEM_PORT", "DYN_TCP_RPC_PORT", "DYN_TCP_RESPONSE_STREAM_PORT"])
@pytest.mark.parametrize("value", ["tcp://10.0.0.1:9090", "70000", "08080", "-2", "1e3", "http", "9" * 30])
def test_a_variable_that_holds_no_port_ends_the_start_in_one_sentence(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    sentence = refusal([])
    assert sentence.startswith(f"{variable} must be a port number from 0 to ")
    assert f", not {value!r}" in sentence
    assert ("Kubernetes" in sentence) is value.startswith("tcp://")


@pytest.mark.parametrize("value", ["", "0", "-1", "8081", "32767"])
def test_a_status_port_that_is_one_is_taken(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_SYSTEM_PORT", value)
    assert parse([]).notes == ()


BAD = [
    (
        ["--multimodal-embedding-cache-capacity-gb", "inf"],
        "--multimodal-embedding-cache-capacity-gb must be a size in GB above 0, or 0 for none, not inf",
    ),
    (
        ["--multimodal-embedding-cache-capacity-gb", "-1"],
        "--multimodal-embedding-cache-capacity-gb must be a size in GB above 0, or 0 for none, not -1.0",
    ),
    (["--max-batch-size", "0"], "--max-batch-size must be a whole number of at least 1, not '0'"),
    (["--max-batch-size", "many"], "--max-batch-size must be a whole number of at least 1, not 'many'"),
    (["--max-batch-size", "-1"], "--max-batch-size must be a whole number of at least 1, not '-1'"),
    (
        ["--free-gpu-memory-fraction", "1.5"],
        "--free-gpu-memory-fraction must be a fraction above 0 and at most 1, not '1.5'",
    ),
    (["--max-file-size-mb", "nan"], "--max-file-size-mb must be a size in MB above 0, not 'nan'"),
    (["--media-cache-mb", "-1"], "--media-cache-mb must be a size in MB, or 0 to turn it off, not '-1'"),
    *[
        (
            ["--limit-mm-per-prompt", text],
            "--limit-mm-per-prompt must be counts such as image=16,video=1, or a JSON object of them, "
            f"not {text!r}",
        )
        for text in (
            *("image", "image=", "image=-1", "image=x", "=3", "image=1.5", "image=1,image=2", "{}", "[1]"),
            *(
                '{"image": "1"}',
                '{"image": true}',
                '{"video": {"count": 1, "num_frames": 8}}',
                "image=99999999999",
            ),
        )
    ],
    *[
        (
            ["--allowed-media-domains", text],
            (
                "--allowed-media-domains must be names of hosts without scheme, "
                f"port and path, with a comma between two, not {text!r}"
            ),
        )
        for text in ("https://a.org", "a.org/x", "a.org:80", "*", "a.*", ",", "u@a.org", "[::1")
    ],
    (
        ["--media-fetch-timeout", "inf"],
        "--media-fetch-timeout must be a number of seconds above 0, not 'inf'",
    ),
    (["--modality", "video_diffusion"], "--modality must be text or multimodal, not 'video_diffusion'"),
    (["--engine", "vllm"], "--engine must be tensorrt_llm, transformers or double, not 'vllm'"),
    (["--load-format", "gms"], "--load-format must be auto, dummy or vision_only, not 'gms'"),
    (
        ["--encode-endpoint", "encode"],
        "--encode-endpoint must be an endpoint of the form dyn://namespace.component.endpoint, not 'encode'",
    ),
    (
        ["--endpoint", "a.b"],
        "--endpoint must be an endpoint of the form dyn://namespace.component.endpoint, not 'a.b'",
    ),
    (
        ["--allowed-local-media-path", "/nonexistent"],
        "--allowed-local-media-path must be a directory that exists, not '/nonexistent'",
    ),
    (["--override-engine-args", "[1]"], "--override-engine-args must be a JSON object, not '[1]'"),
    (
        ["--override-engine-args", "{max_batch_size: 1}"],
        "--override-engine-args must be a JSON object, not '{max_batch_size: 1}'",
    ),
    (
        ["--endpoint-types", "embedding"],
        "--endpoint-types must be chat, completions, both with a comma, or none, not 'embedding'",
    ),
    (
        ["--health-check-payload", "@/none"],
        "--health-check-payload must be a JSON object, or @FILE with one in it",
    ),
    (
        ["--custom-jinja-template", "/none"],
        "the file of --custom-jinja-template does not exist: give the path of a Jinja template",
    ),
    (["--connector", "kvbm"], "--connector must be none: this worker has no KV cache connector"),
    (
        ["--output-modalities", "image"],
        "--output-modalities must be text: this worker generates nothing else",
    ),
    (["--fpm-trace"], "--fpm-trace is not available in this worker: remove it"),
    (
        ["--multimodal-embedding-cache-publisher"],
        "--multimodal-embedding-cache-publisher is not available in this worker: remove it",
    ),
    (
        ["--max-batchsize", "3"],
        "--max-batchsize is not a flag of this worker: did you mean --max-batch-size?",
    ),
    (["--zzz"], "--zzz is not a flag of this worker: --help lists every flag"),
    (["--model", "a", "b"], "the argument 'b' belongs to no flag: remove it, or write the flag before it"),
    (
        ["--no-frontend-decoding"],
        "--no-frontend-decoding is a flag of Dynamo's own component that this worker does not have: "
        "this worker fetches and decodes media itself",
    ),
    (
        ["--dit-cfg-size", "2"],
        "--dit-cfg-size is a flag of Dynamo's own component that this worker does not have: "
        "it is for generating images and videos",
    ),
    (
        ["--router-kv-overlap-score-weight", "2"],
        (
            "--router-kv-overlap-score-weight is a flag of Dynamo's own component "
            "that this worker does not have: set routing on the frontend"
        ),
    ),
    (["--max-batch-size"], "--max-batch-size: expected one argument (--help lists every flag)"),
    (
        ["--engine", "double", "--trtllm.double", "3"],
        "the engine argument double is a mapping for --engine double: remove it, or choose that engine",
    ),
    (
        ["--trtllm.double.delay_s", "3"],
        "the engine argument double is a mapping for --engine double: remove it, or choose that engine",
    ),
    (["--trtllm.model", "x"], "the engine argument model (--trtllm.model) is set by --model-path: remove it"),
    (
        [*ENCODE, "--check", "--against", "x"],
        "an encode worker has no other side for --against: it compares prefill with decode",
    ),
    *(
        ([flag, "1e308"], f"{flag} must be a {wanted}, not '1e308'")
        for flag, wanted in (
            ("--max-file-size-mb", "size in MB above 0"),
            ("--media-cache-mb", "size in MB, or 0 to turn it off"),
            ("--transfer-pool-mb", "size in MB above 0"),
            ("--gpu-memory-gb", "size in GB above 0"),
            ("--image-decode-timeout", "number of seconds above 0"),
        )
    ),
    (
        ["--multimodal-embedding-cache-capacity-gb", "1e308"],
        "--multimodal-embedding-cache-capacity-gb must be a size in GB above 0, or 0 for none, not 1e+308",
    ),
    (
        ["--allowed-local-media-path", "~no-such-user/x"],
        "--allowed-local-media-path must be a directory that exists, not '~no-such-user/x'",
    ),
    (
        ["--allowed-local-media-path", LONG],
        f"--allowed-local-media-path must be a directory that exists, not '{LONG[:77]}...'",
    ),
    (["--extra-engine-args", "~no-such-user/x"], "--extra-engine-args must be a file, not '~no-such-user/x'"),
    (
        ["--extra-engine-args", LONG],
        f"the engine configuration {LONG} cannot be read: give the path of a YAML file",
    ),
    (
        ["--model", LONG],
        (
            "--model must be a directory that can be looked into, a Hugging Face name, "
            f"demo or demo-audio, not '{LONG[:77]}...'"
        ),
    ),
    (["--served-model-name", "\udcff"], "--served-model-name must be one or more names, not '\\udcff'"),
    (["--dump-config-to", "/no-such/x"], NO_DUMP),
    (["--dump-config-to", "/"], NO_DUMP),
    (["--dump-config-to", LONG], NO_DUMP),
    (
        ["--health-check-payload", "@/dev/zero"],
        "--health-check-payload must be a JSON object, or @FILE with one in it",
    ),
    (
        ["--namespace", "a b"],
        "--namespace (DYN_NAMESPACE) must be a word without spaces, dots and slashes, not 'a b'",
    ),
    (
        ["--check", "--against", "x"],
        "an aggregated worker has no other side for --against: it compares prefill with decode",
    ),
]


@pytest.mark.parametrize(("arguments", "sentence"), BAD, ids=[" ".join(case[0])[:80] for case in BAD])
def test_a_bad_value_or_an_unknown_flag_ends_the_start_with_one_sentence(
    arguments: list[str], sentence: str
) -> None:
    assert refusal(arguments) == sentence


@pytest.mark.parametrize(
    ("variable", "text", "sentence"),
    [
        (
            "DYN_TRTLLM_MAX_BATCH_SIZE",
            "x",
            "DYN_TRTLLM_MAX_BATCH_SIZE must be a whole number of at least 1, not 'x'",
        ),
        ("MODALITY", "video", "MODALITY must be text or multimodal, not 'video'"),
        ("DYN_MM_ALLOW_INTERNAL", "maybe", "DYN_MM_ALLOW_INTERNAL must be true or false, not 'maybe'"),
        ("DYN_REQUEST_PLANE", "http", "DYN_REQUEST_PLANE must be one of tcp, nats, not 'http'"),
        ("DYN_STORE_KV", "disk", "DYN_STORE_KV must be etcd, file or mem, not 'disk'"),
    ],
)
def test_a_bad_variable_is_named(
    variable: str, text: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, text)
    assert refusal([]) == sentence


@pytest.mark.parametrize(
    "variable", ["DYN_ENGINE_REQUEST_LIMIT", "DYN_MULTIMODAL_EMBEDDING_CACHE_CAPACITY_GB"]
)
def test_a_bad_variable_of_dynamos_own_ends_the_start(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "x")
    assert refusal([]) == f"{variable} has a value of the wrong kind: --help says which it takes"


def test_a_flag_given_twice_takes_its_last_value_and_an_empty_one_counts_as_not_given() -> None:
    assert parse_args(["--max-images", "2", "--max-images", "3", "--max-images", ""]).media.max_images == 3


def test_every_flag_has_a_variable_unless_it_is_a_command_or_an_old_name() -> None:
    without = {flag.name for flag in FLAGS.values() if not flag.variables}
    assert without == {
        "--check",
        "--against",
        "--engine-report",
        "--live",
        "--gpu-memory-gb",
        "--store-kv",
        "--use-nixl-connect",
        "--migration-limit",
    }


SEED_FLAGS = [
    "--model-path",
    "--served-model-name",
    "--tensor-parallel-size",
    "--pipeline-parallel-size",
    "--expert-parallel-size",
    "--kv-block-size",
    "--gpus-per-node",
    "--max-batch-size",
    "--max-num-tokens",
    "--max-seq-len",
    "--max-beam-width",
    "--free-gpu-memory-fraction",
    "--extra-engine-args",
    "--override-engine-args",
    "--publish-events-and-metrics",
    "--disaggregation-mode",
    "--modality",
    "--encode-endpoint",
    "--allowed-local-media-path",
    "--max-file-size-mb",
    "--use-nixl-connect",
    "--version",
    "--endpoint",
    "--store-kv",
    "--request-plane",
    "--dyn-tool-call-parser",
    "--dyn-reasoning-parser",
    "--custom-jinja-template",
    "--dyn-endpoint-types",
    "--dump-config-to",
    "--migration-limit",
    "--enable-local-indexer",
]

BLOCKED_START = """
import importlib.abc, sys

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "nixl", "transformers", "tensorrt_llm"}:
            raise ImportError(name)

sys.meta_path.insert(0, Block())
from dynamo.trtllm.utils.trtllm_utils import parse
try:
    parse(sys.argv[1:])
except SystemExit as end:
    heavy = [name for name in sys.modules if name.startswith("dynamo.common")]
    print("exit", end.code, len(heavy))
"""


def run_blocked(flag: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", BLOCKED_START, flag], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stderr == ""
    return result.stdout


def test_help_lists_every_flag_without_importing_an_engine_torch_or_nixl() -> None:
    printed = run_blocked("--help")
    words = set(printed.replace(",", " ").split())
    assert not [
        flag for flag in [*SEED_FLAGS, *FLAGS, "--discovery-backend", "--event-plane"] if flag not in words
    ]
    assert {
        "--model",
        "--publish-kv-events",
        "--enable-multimodal",
        "--no-publish-metrics",
        "DYN_TRTLLM_MODEL_PATH",
    } <= words
    assert printed.splitlines()[-1].startswith("exit 0 ")


def test_version_names_the_package_without_importing_dynamo_either() -> None:
    import dynamo.trtllm

    line, end = run_blocked("--version").splitlines()
    directory = Path(dynamo.trtllm.__file__).resolve().parent
    assert line == f"dynamo-trtllm {dynamo.trtllm.__version__} (dynamo.trtllm from {directory})"
    assert end == "exit 0 0"


def test_every_switch_can_be_turned_off() -> None:
    for flag in FLAGS.values():
        if flag.is_switch:
            assert parse([f"--no-{flag.name[2:]}"]).check is None


def test_engine_arguments_can_be_written_as_json() -> None:
    assert json.loads(json.dumps(dict(parse_args([]).engine.args)))["tensor_parallel_size"] == 1
