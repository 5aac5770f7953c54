"""Command line of the worker: flags, environment, files and defaults in, one frozen `Invocation` out.

The only module that reads the environment. Order, the strongest first: `--override-engine-args` (or `--trtllm.GROUP.KEY`),
command line, environment, the YAML file of `--extra-engine-args`, default. Imports no engine, no torch and no NIXL.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import dynamo.trtllm
from dynamo.trtllm.config import (
    DEFAULT_ENGINE_ARGS,
    MEBIBYTE,
    CheckOptions,
    EngineConfig,
    EngineKind,
    Invocation,
    MediaConfig,
    Modality,
    ModelConfig,
    PeerConfig,
    Role,
    RuntimeConfig,
    TransferConfig,
    WorkerConfig,
    default_endpoint,
)
from dynamo.trtllm.errors import StartupError
from dynamo.trtllm.utils.flags import ENDPOINT, FALSE_WORDS, FLAGS, GIGABYTES, JSON_OBJECT, NO_OPS, TRUE_WORDS
from dynamo.trtllm.utils.kinds import drop_empty, show
from dynamo.trtllm.utils.layers import Layer, leaves, merge_layers, nested, origin_of, split_dotted
from dynamo.trtllm.utils.ports import check_ports
from dynamo.trtllm.utils.settings import (
    Level,
    Said,
    Setting,
    a_role,
    build_parser,
    convert,
    keep_useful,
    read_command_line,
    read_environment,
    refuse_unknown,
    stronger,
    unknown_variables,
)
from dynamo.trtllm.utils.yaml_files import read_yaml

Settings = Mapping[str, Setting]
_PAYLOAD_BYTES = 1 << 20
_NO_DUMP = "the file of --dump-config-to cannot be written: give a path in a directory that exists"
_DUMPED = 2000
"""Characters of one engine argument that the start-up log and `--check` print at most."""


def parse_args(argv: Sequence[str] | None = None) -> WorkerConfig:
    """The worker's configuration from `argv` (None: the process's own). See `parse`."""
    return parse(argv).config


def parse(argv: Sequence[str] | None = None) -> Invocation:
    """Read `argv` (None: the process's own arguments), the environment and the YAML file.

    `--help` and `--version` print and raise `SystemExit(0)`. Every other input that cannot be used raises `StartupError`, in one
    sentence that says what to change. Settings that Dynamo's Rust side reads from the environment itself are written there.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--version" in arguments:
        print(version_line())
        raise SystemExit(0)
    check_ports(os.environ)
    arguments, dotted = split_dotted(arguments)
    given, runtime = _parse_flags(arguments)
    command_line = read_command_line(given)
    said = {**read_environment(os.environ), **command_line}
    role = _first(said, "--disaggregation-mode", Role.AGGREGATED)
    kind = _first(said, "--engine", EngineKind.TENSORRT_LLM)
    said, notes = keep_useful(said, role, kind)
    settings = {name: convert(entry) for name, entry in said.items() if name not in NO_OPS}
    notes += [f"{said[name].name} is deprecated: {reason}" for name, reason in NO_OPS.items() if name in said]
    config = _build(role, settings, runtime, dotted, notes)
    return Invocation(config=config, check=_check_options(role, settings), notes=(*notes, *_notes(config, settings)))


def version_line() -> str:
    """Our version, and the directory that `dynamo.trtllm` was imported from: `ai-dynamo` has a package of that name too."""
    package = Path(str(dynamo.trtllm.__file__)).resolve().parent
    return f"dynamo-trtllm {dynamo.trtllm.__version__} (dynamo.trtllm from {package})"


def _parse_flags(arguments: Sequence[str]) -> tuple[list[Said], Any]:
    """What was said of our own flags, in order, and Dynamo's `DynamoRuntimeConfig`, validated."""
    from dynamo.common.configuration.groups.runtime_args import DynamoRuntimeArgGroup, DynamoRuntimeConfig

    parser = build_parser()
    try:
        DynamoRuntimeArgGroup().add_arguments(parser)
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise StartupError(f"{_variables_in(str(error))} has a value of the wrong kind: --help says which it takes") from error
    namespace, unknown = parser.parse_known_args(arguments)
    refuse_unknown(unknown, [spelling for spelling in parser._option_string_actions if spelling.startswith("--")])
    given = getattr(namespace, "given", [])
    for action in parser._actions:
        value = getattr(namespace, action.dest, None)
        if action.choices is not None and value is not None and value not in action.choices:
            wanted = ", ".join(map(str, action.choices))
            raise StartupError(f"{_variables_in(repr(value))} must be one of {wanted}, not {value!r}")
    _apply_old_spellings(namespace, given, arguments)
    runtime = DynamoRuntimeConfig.from_cli_args(namespace)
    try:
        runtime.validate()
    except ValueError as error:
        raise StartupError(f"{error}") from error
    return given, runtime


def _variables_in(text: str) -> str:
    """The variables of Dynamo whose value stands in quotes in `text`; Dynamo itself does not name them."""
    given = sorted(name for name, value in os.environ.items() if name.startswith("DYN_") and repr(value) in text)
    return " or ".join(given) or "a variable of Dynamo's runtime options"


def _apply_old_spellings(namespace: argparse.Namespace, given: Sequence[Said], arguments: Sequence[str]) -> None:
    """`--store-kv` and DYN_STORE_KV of Dynamo 0.8 stand in for `--discovery-backend` and DYN_DISCOVERY_BACKEND."""
    stores = [convert(entry).value for entry in given if entry.flag.name == "--store-kv"]
    named = any(argument.partition("=")[0] == "--discovery-backend" for argument in arguments)
    if stores and named and stores[-1] != namespace.discovery_backend:
        raise StartupError("--store-kv and --discovery-backend contradict each other: keep --discovery-backend")
    variable = os.environ.get("DYN_STORE_KV")
    if stores:
        namespace.discovery_backend = stores[-1]
    elif variable and not named and "DYN_DISCOVERY_BACKEND" not in os.environ:
        namespace.discovery_backend = convert(Said(FLAGS["--store-kv"], variable, "DYN_STORE_KV", Level.VARIABLE)).value


def _first(said: Mapping[str, Said], name: str, default: Any) -> Any:
    return convert(said[name]).value if name in said else default


def _build(role: Role, settings: Settings, runtime: Any, dotted: Sequence[Layer], notes: list[str]) -> WorkerConfig:
    """Fill the layers; the rules between flags are checked on the way, before any file is read. Adds to `notes`."""
    layers: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, setting in settings.items():
        lands = FLAGS[name].lands
        if lands is not None:
            layer, _, field = lands.partition(".")
            layers[layer][field] = setting.value
    modality = _modality(role, settings, notes)
    _drop_without_encoder(role, modality, settings, layers["peers"], notes)
    runtime_layer = _runtime(role, runtime, layers["runtime"])
    layers["peers"].setdefault("prefill_endpoint", default_endpoint(Role.PREFILL, runtime_layer.namespace))
    layers["model"].update(modality=modality, **_model_of(runtime))
    layers["engine"].update(_published(settings))
    layers["media"].update(_media(settings, runtime))
    model = ModelConfig(**layers["model"])
    args, origins = _engine_args(settings, dotted, notes)
    script = args.pop("double", {})
    kind = layers["engine"].get("kind", EngineConfig.kind)
    _check_engine_args(args, origins, script, kind)
    engine = EngineConfig(
        model_path=model.path, modality=modality, role=role, args=args, origins=origins, double_script=script, **layers["engine"]
    )
    return WorkerConfig(
        role=role,
        runtime=runtime_layer,
        model=model,
        media=MediaConfig(**layers["media"]),
        engine=engine,
        peers=PeerConfig(**layers["peers"]),
        transfer=TransferConfig(**layers["transfer"]),
    )


def _modality(role: Role, settings: Settings, notes: list[str]) -> Modality:
    """`--modality` and `--enable-multimodal` are one; an encode worker is multimodal by itself."""
    switch = settings.get("--enable-multimodal")
    if switch is not None:
        switch = Setting(Modality.MULTIMODAL if switch.value else Modality.TEXT, switch.name, switch.level)
    chosen = stronger(settings.get("--modality"), switch)
    if role is not Role.ENCODE:
        return chosen.value if chosen else ModelConfig.modality
    if chosen is not None and chosen.value is Modality.TEXT and chosen.level is Level.COMMAND_LINE:
        notes.append(f"an encode worker is multimodal by itself, so {chosen.name} is ignored")
    return Modality.MULTIMODAL


def _drop_without_encoder(
    role: Role, modality: Modality, settings: Settings, peers: dict[str, Any], notes: list[str]
) -> None:
    """Takes out of `peers` what only makes sense with an encode worker that media go to; notes what the user said of it."""
    encoder = settings.get("--encode-endpoint")
    if encoder is not None and modality is Modality.TEXT:
        _note_unused(settings, ("--encode-endpoint",), "a text worker has no use for", notes, least=Level.VARIABLE)
        encoder = None
    if encoder is not None:
        return
    peers.pop("encode_endpoint", None)
    peers.pop("encode_fallback", None)
    if role is not Role.DECODE:
        peers.pop("timeout_s", None)
    names = ["--encode-fallback"] if role is Role.DECODE else ["--encode-fallback", "--peer-timeout"]
    _note_unused(settings, names, "a worker without --encode-endpoint has no use for", notes)
    if role is Role.AGGREGATED:
        names = ["--transfer-pool-mb", "--transfer-ttl", "--transfer-through-host"]
        _note_unused(settings, names, "an aggregated worker without --encode-endpoint has no use for", notes)


def _note_unused(
    settings: Settings, names: Sequence[str], who: str, notes: list[str], least: Level = Level.COMMAND_LINE
) -> None:
    said = [settings[name] for name in names if name in settings]
    notes += [f"{who} {each.name}, so it is ignored" for each in said if each.value and each.level >= least]


def _published(settings: Settings) -> dict[str, bool]:
    """KV events and metrics each follow their own flag or the combined one, whichever was said more strongly."""
    both = settings.get("--publish-events-and-metrics")
    fields = {"publish_kv_events": "--publish-kv-events", "publish_metrics": "--publish-metrics"}
    chosen = {field: stronger(settings.get(name), both) for field, name in fields.items()}
    return {field: setting.value for field, setting in chosen.items() if setting is not None}


def _media(settings: Settings, runtime: Any) -> dict[str, Any]:
    """Media fields that do not follow from one flag alone."""
    fields: dict[str, Any] = {
        "local_images": "--allowed-local-media-path" in settings,
        "allow_internal": _truth_of("DYN_MM_ALLOW_INTERNAL"),
    }
    file, request = settings.get("--max-file-size-mb"), settings.get("--max-request-media-mb")
    file_bytes = file.value if file else MediaConfig.max_file_bytes
    if request is not None and request.value < file_bytes:
        said = file.name if file else "the default of --max-file-size-mb"
        raise StartupError(f"{request.name} is below {said}: raise it to at least {file_bytes / MEBIBYTE:g}")
    if request is None:
        fields["max_request_bytes"] = max(MediaConfig.max_request_bytes, file_bytes)
    cache_gb = runtime.multimodal_embedding_cache_capacity_gb
    if cache_gb:
        if "--media-cache-mb" in settings:
            raise StartupError("--multimodal-embedding-cache-capacity-gb and --media-cache-mb are the same: keep one of them")
        try:
            fields["cache_bytes"] = int(GIGABYTES.convert(str(cache_gb)) * 1024 * MEBIBYTE)
        except ValueError:
            name = "--multimodal-embedding-cache-capacity-gb"
            raise StartupError(f"{name} must be {GIGABYTES.wanted}, or 0 for none, not {cache_gb}") from None
    return fields


def _engine_args(
    settings: Settings, dotted: Sequence[Layer], notes: list[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Engine arguments of all sources, merged, and where each came from. Adds to `notes` what was given without a value."""
    layers = [Layer("default", DEFAULT_ENGINE_ARGS)]
    if "--extra-engine-args" in settings:
        path: Path = settings["--extra-engine-args"].value
        layers.append(Layer(f"file {path.name}", read_yaml(path)))
    for level in (Level.PLAIN, Level.VARIABLE, Level.COMMAND_LINE):
        for name, setting in settings.items():
            argument = FLAGS[name].engine_arg
            if argument is not None and setting.level is level:
                layers.append(Layer(setting.name, nested(argument, setting.value)))
    override = settings.get("--override-engine-args")
    if override is not None and dotted:
        raise StartupError(
            f"{override.name} and {dotted[0].origin} exclude each other: write all overrides in one of the two ways"
        )
    if override is not None:
        layers.append(Layer("override", override.value))
    filled = []
    for layer in (*layers, *dotted):
        args, empty = drop_empty(layer.args)
        notes += [f"{name} ({layer.origin}) is empty, so its default holds" for name in empty]
        filled.append(Layer(layer.origin, args))
    return merge_layers(filled)


def _check_engine_args(args: Mapping[str, Any], origins: Mapping[str, str], script: Any, kind: EngineKind) -> None:
    if "model" in args:
        raise StartupError(f"the engine argument model ({origin_of(origins, 'model')}) is set by --model-path: remove it")
    if not isinstance(script, Mapping) or (script and kind is not EngineKind.DOUBLE):
        raise StartupError("the engine argument double is a mapping for --engine double: remove it, or choose that engine")


def _model_of(runtime: Any) -> dict[str, Any]:
    """What Dynamo's runtime options say about the model's text."""
    template = runtime.custom_jinja_template
    if template:
        template = os.path.expanduser(os.path.expandvars(template))
        if not os.path.isfile(template):
            raise StartupError("the file of --custom-jinja-template does not exist: give the path of a Jinja template")
    return {
        "custom_jinja_template": template or None,
        "tool_call_parser": runtime.dyn_tool_call_parser,
        "reasoning_parser": runtime.dyn_reasoning_parser,
    }


def _runtime(role: Role, runtime: Any, fields: Mapping[str, Any]) -> RuntimeConfig:
    _refuse_runtime_options(runtime)
    endpoint = runtime.endpoint or default_endpoint(role, runtime.namespace)
    try:
        endpoint = ENDPOINT.convert(endpoint)
    except ValueError:
        if not runtime.endpoint:
            raise StartupError(
                f"--namespace (DYN_NAMESPACE) must be a word without spaces, dots and slashes, not {runtime.namespace!r}"
            ) from None
        raise StartupError(f"--endpoint must be {ENDPOINT.wanted}, not {endpoint!r}") from None
    if runtime.engine_request_limit is not None:
        os.environ["DYN_ENGINE_REQUEST_LIMIT"] = str(runtime.engine_request_limit)
    indexer = fields.get("enable_local_indexer", _truth_of("DYN_LOCAL_INDEXER", RuntimeConfig.enable_local_indexer))
    return RuntimeConfig(
        namespace=endpoint.removeprefix("dyn://").partition(".")[0],
        endpoint=endpoint,
        discovery_backend=runtime.discovery_backend,
        request_plane=runtime.request_plane,
        response_plane=runtime.response_plane,
        event_plane=runtime.event_plane,
        endpoint_types=_endpoint_types(runtime.endpoint_types),
        push_egress=not _truth_of("DYN_TRTLLM_PULL_EGRESS"),
        enable_local_indexer=indexer,
        exclude_tools_when_tool_choice_none=runtime.exclude_tools_when_tool_choice_none,
        default_thinking_mode=runtime.dyn_default_thinking_mode,
        structural_tag=runtime.structural_tag,
        kv_state_endpoint=runtime.kv_state_endpoint,
        health_check_payload=_health_check_payload(runtime.health_check_payload),
        dump_config_to=_dump_file(runtime.dump_config_to),
    )


def _refuse_runtime_options(runtime: Any) -> None:
    """Options of Dynamo's runtime group that would have no effect here."""
    if [name for name in runtime.connector if name not in ("none", "null")]:
        raise StartupError("--connector must be none: this worker has no KV cache connector")
    if [name for name in runtime.output_modalities if name.lower() != "text"]:
        raise StartupError("--output-modalities must be text: this worker generates nothing else")
    if runtime.multimodal_embedding_cache_publisher:
        raise StartupError("--multimodal-embedding-cache-publisher is not available in this worker: remove it")
    if runtime.fpm_trace:
        raise StartupError("--fpm-trace is not available in this worker: remove it")


def _endpoint_types(text: str) -> tuple[str, ...]:
    """Names of endpoints to serve; `none` alone is no endpoint at all."""
    names = tuple(dict.fromkeys(name.strip().lower() for name in text.split(",") if name.strip()))
    if names == ("none",):
        return ()
    if not names or not set(names) <= {"chat", "completions"}:
        raise StartupError(f"--endpoint-types must be chat, completions, both with a comma, or none, not {text!r}")
    return names


def _health_check_payload(text: str | None) -> dict[str, Any] | None:
    """A JSON object, or `@FILE` with one in it."""
    if not text:
        return None
    try:
        content = _read_payload(Path(text[1:])) if text.startswith("@") else text
        payload: dict[str, Any] = JSON_OBJECT.convert(content)
    except (OSError, ValueError) as error:
        raise StartupError("--health-check-payload must be a JSON object, or @FILE with one in it") from error
    os.environ["DYN_HEALTH_CHECK_PAYLOAD"] = json.dumps(payload)
    return payload


def _read_payload(path: Path) -> str:
    """At most `_PAYLOAD_BYTES` of a file; devices and pipes may have no end. Raises `OSError` and `ValueError`."""
    if not path.is_file() or path.stat().st_size > _PAYLOAD_BYTES:
        raise ValueError
    return path.read_text(encoding="utf-8")


def _dump_file(text: str | None) -> str | None:
    """The path of `--dump-config-to` if a file can be there; an empty one counts as not given."""
    if not text:
        return None
    path = Path(text)
    try:
        fits = path.parent.is_dir() and not path.is_dir()
    except (OSError, ValueError):
        fits = False
    if not fits:
        raise StartupError(_NO_DUMP)
    return text


def _truth_of(variable: str, default: bool = False) -> bool:
    text = os.environ.get(variable, "").strip().lower()
    if not text:
        return default
    if text not in TRUE_WORDS | FALSE_WORDS:
        raise StartupError(f"{variable} must be true or false, not {text!r}")
    return text in TRUE_WORDS


def _check_options(role: Role, settings: Settings) -> CheckOptions | None:
    against, memory = settings.get("--against"), settings.get("--gpu-memory-gb")
    report, live, check = (name in settings and settings[name].value for name in ("--engine-report", "--live", "--check"))
    if not check:
        stray = [name for name in ("--against", "--engine-report", "--live", "--gpu-memory-gb") if name in settings]
        stray = [name for name in stray if settings[name].value]
        if stray:
            raise StartupError(f"{stray[0]} is of no use without --check: add that, or remove it")
        return None
    if against is not None and role not in (Role.PREFILL, Role.DECODE):
        raise StartupError(f"{a_role(role)} has no other side for --against: it compares prefill with decode")
    return CheckOptions(
        against=against.value if against else None,
        engine_report=report,
        live=live,
        gpu_memory_gb=memory.value if memory else None,
    )


def _notes(config: WorkerConfig, settings: Settings) -> list[str]:
    """Things that are allowed but probably not meant."""
    notes = [f"{name} is not a variable of this worker, so it is ignored" for name in unknown_variables(os.environ)]
    if config.model.modality is Modality.TEXT:
        media = [setting for name, setting in settings.items() if (FLAGS[name].lands or "").startswith("media.")]
        unused = [setting.name for setting in media if setting.level > Level.PLAIN]
        if unused:
            notes.append(f"{', '.join(unused)} has no effect on a text worker: --modality multimodal would serve media")
    if "--publish-events-and-metrics" in settings:
        notes.append(f"{settings['--publish-events-and-metrics'].name} stands for --publish-kv-events and --publish-metrics")
    return notes


def write_config(config: WorkerConfig) -> None:
    """Write the whole configuration as JSON to the file of `--dump-config-to`, where that was given.

    Raises `StartupError` when the file cannot be written.
    """
    if config.runtime.dump_config_to is None:
        return
    text = json.dumps(dataclasses.asdict(config), default=str, indent=2, sort_keys=True)
    try:
        Path(config.runtime.dump_config_to).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise StartupError(_NO_DUMP) from error


def dump_engine_args(engine: EngineConfig) -> str:
    """The merged engine arguments, one `name = value  (origin)` line each, for the start-up log and for `--check`."""
    found = sorted(leaves(engine.args))
    return "\n".join(f"{dotted} = {show(value, _DUMPED)}  ({origin_of(engine.origins, dotted)})" for dotted, value in found)
