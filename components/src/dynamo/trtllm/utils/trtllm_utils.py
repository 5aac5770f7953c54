"""The worker's configuration: flags, environment, files and defaults in, one frozen `Invocation` out.

Order, the strongest first: `--override-engine-args` (or `--trtllm.GROUP.KEY`), command line, environment, the
YAML file of `--extra-engine-args`, default. Here are the rules between flags; what one flag fills is said in
`config.py`. Reads the environment and leaves it as it is. Imports no engine, no torch and no NIXL.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import dynamo.trtllm
from dynamo.trtllm.config import (
    MEBIBYTE,
    AudioLimits,
    EngineConfig,
    EngineKind,
    MediaConfig,
    Modality,
    ModelConfig,
    PeerConfig,
    Role,
    TransferConfig,
    VideoLimits,
    WorkerConfig,
    default_endpoint,
)
from dynamo.trtllm.engine_flags import DEFAULT_ENGINE_ARGS
from dynamo.trtllm.errors import StartupError
from dynamo.trtllm.flag import flags_of
from dynamo.trtllm.invocation import CheckOptions, Invocation, Sources
from dynamo.trtllm.roles import a_role
from dynamo.trtllm.utils.dynamo_options import (
    NO_DUMP,
    DynamoOptions,
    cache_bytes,
    model_fields,
    parse_flags,
    runtime_layer,
)
from dynamo.trtllm.utils.engine_args import drop_empty, show
from dynamo.trtllm.utils.flags import FLAGS, GROUPS
from dynamo.trtllm.utils.layers import Layer, leaves, merge_layers, nested, origin_of, split_dotted
from dynamo.trtllm.utils.ports import check_ports
from dynamo.trtllm.utils.settings import (
    Level,
    Setting,
    Settings,
    convert,
    fields_of,
    fill,
    keep_useful,
    read_command_line,
    read_environment,
    stronger,
    truth_of,
    unknown_variables,
    value_of,
)
from dynamo.trtllm.utils.yaml_files import read_yaml

_DUMPED = 2000
"""Characters of one engine argument that the start-up log and `--check` print at most."""


def parse_args(argv: Sequence[str] | None = None) -> WorkerConfig:
    """The worker's configuration from `argv` (None: the process's own). See `parse`."""
    return parse(argv).config


def parse(argv: Sequence[str] | None = None) -> Invocation:
    """Read `argv` (None: the process's own arguments), the environment and the YAML file.

    `--help` and `--version` print and raise `SystemExit(0)`. Every other input that cannot be used raises
    `StartupError`, in one sentence that says what to change.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--version" in arguments:
        print(version_line())
        raise SystemExit(0)
    check_ports(os.environ)
    arguments, dotted = split_dotted(arguments)
    command_line, options = parse_flags(arguments)
    given = {**read_environment(os.environ), **read_command_line(command_line)}
    role = value_of(given, WorkerConfig, "role")
    given, notes = keep_useful(given, role, value_of(given, EngineConfig, "kind"))
    no_ops = {name: flag.no_op for name, flag in FLAGS.items() if name in given and flag.no_op}
    settings = {name: convert(each) for name, each in given.items() if name not in no_ops}
    notes += [f"{given[name].name} is deprecated: {reason}" for name, reason in no_ops.items()]
    config = _build(role, settings, options, dotted, notes)
    return Invocation(
        config=config, check=_check_options(role, settings), notes=(*notes, *_notes(config, settings))
    )


def version_line() -> str:
    """Our version, and where `dynamo.trtllm` was imported from: `ai-dynamo` has one of that name too."""
    package = Path(str(dynamo.trtllm.__file__)).resolve().parent
    return f"dynamo-trtllm {dynamo.trtllm.__version__} (dynamo.trtllm from {package})"


def _build(
    role: Role, settings: Settings, options: DynamoOptions, dotted: Sequence[Layer], notes: list[str]
) -> WorkerConfig:
    """Fill the layers; rules between flags are checked before any file is read. Adds to `notes`."""
    modality = _modality(role, settings, notes)
    usable = _without_encoder(role, modality, settings, notes)
    runtime = runtime_layer(role, options, settings)
    peers = {
        "prefill_endpoint": default_endpoint(Role.PREFILL, runtime.namespace),
        **fields_of(PeerConfig, usable),
    }
    published = _published(settings)
    media = fill(MediaConfig, settings, **_media(settings, options))
    model = fill(ModelConfig, settings, modality=modality, **model_fields(options))
    args, origins = _engine_args(settings, dotted, notes)
    script = args.pop("double", {})
    engine = fill(
        EngineConfig,
        settings,
        model_path=model.path,
        modality=modality,
        role=role,
        args=args,
        origins=origins,
        double_script=script,
        **published,
    )
    _check_engine_args(args, origins, script, engine.kind)
    return WorkerConfig(
        role=role,
        runtime=runtime,
        model=model,
        media=media,
        engine=engine,
        peers=PeerConfig(**peers),
        transfer=fill(TransferConfig, settings),
    )


def _modality(role: Role, settings: Settings, notes: list[str]) -> Modality:
    """`--modality` and `--enable-multimodal` are one; an encode worker is multimodal by itself."""
    switch = settings.get("--enable-multimodal")
    if switch is not None:
        switch = Setting(Modality.MULTIMODAL if switch.value else Modality.TEXT, switch.name, switch.level)
    chosen = stronger(settings.get("--modality"), switch)
    if role.runs_language_model:
        return chosen.value if chosen else ModelConfig.modality
    if chosen is not None and chosen.value is Modality.TEXT and chosen.level is Level.COMMAND_LINE:
        notes.append(f"an encode worker is multimodal by itself, so {chosen.name} is ignored")
    return Modality.MULTIMODAL


def _without_encoder(role: Role, modality: Modality, settings: Settings, notes: list[str]) -> Settings:
    """`settings` without what makes sense only beside an encode worker; notes what was said of it."""
    encoder = settings.get("--encode-endpoint")
    if encoder is not None and modality is Modality.TEXT:
        _note_unused(
            settings, ("--encode-endpoint",), "a text worker has no use for", notes, least=Level.VARIABLE
        )
        encoder = None
    if encoder is not None:
        return settings
    useless = ["--encode-fallback"] if role.asks_prefill_workers else ["--encode-fallback", "--peer-timeout"]
    _note_unused(settings, useless, "a worker without --encode-endpoint has no use for", notes)
    if role.runs_language_model and not role.moves_kv_caches:
        transfer = [flag.name for flag in flags_of(TransferConfig).values()]
        _note_unused(
            settings, transfer, "an aggregated worker without --encode-endpoint has no use for", notes
        )
    return {name: each for name, each in settings.items() if name not in ("--encode-endpoint", *useless)}


def _note_unused(
    settings: Settings, names: Sequence[str], who: str, notes: list[str], least: Level = Level.COMMAND_LINE
) -> None:
    given = [settings[name] for name in names if name in settings]
    notes += [f"{who} {each.name}, so it is ignored" for each in given if each.value and each.level >= least]


def _published(settings: Settings) -> dict[str, bool]:
    """KV events and metrics follow their own flag or the combined one, whichever was said more strongly."""
    both = settings.get("--publish-events-and-metrics")
    fields = {"publish_kv_events": "--publish-kv-events", "publish_metrics": "--publish-metrics"}
    chosen = {field: stronger(settings.get(name), both) for field, name in fields.items()}
    return {field: setting.value for field, setting in chosen.items() if setting is not None}


def _media(settings: Settings, options: DynamoOptions) -> dict[str, Any]:
    """Media fields that do not follow from one flag alone."""
    fields: dict[str, Any] = {
        "video": fill(VideoLimits, settings),
        "audio": fill(AudioLimits, settings),
        "local_files": "--allowed-local-media-path" in settings,
        "allow_internal": truth_of(os.environ, "DYN_MM_ALLOW_INTERNAL"),
    }
    file, request = settings.get("--max-file-size-mb"), settings.get("--max-request-media-mb")
    file_bytes = file.value if file else MediaConfig.max_file_bytes
    if request is not None and request.value < file_bytes:
        name = file.name if file else "the default of --max-file-size-mb"
        raise StartupError(f"{request.name} is below {name}: raise it to at least {file_bytes / MEBIBYTE:g}")
    if request is None:
        fields["max_request_bytes"] = max(MediaConfig.max_request_bytes, file_bytes)
    cache = cache_bytes(options)
    if cache is not None:
        if "--media-cache-mb" in settings:
            raise StartupError(
                "--multimodal-embedding-cache-capacity-gb and --media-cache-mb are the same: keep one of them"
            )
        fields["cache_bytes"] = cache
    return fields


def _engine_args(
    settings: Settings, dotted: Sequence[Layer], notes: list[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Engine arguments of all sources, merged, and the origin of each.
    Adds to `notes` keys without a value."""
    layers = [Layer("default", DEFAULT_ENGINE_ARGS)]
    if "--extra-engine-args" in settings:
        path: Path = settings["--extra-engine-args"].value
        layers.append(Layer(f"file {path.name}", read_yaml(path)))
    for level in (Level.SHARED, Level.VARIABLE, Level.COMMAND_LINE):
        for name, setting in settings.items():
            argument = FLAGS[name].argument
            if argument is not None and setting.level is level:
                layers.append(Layer(setting.name, nested(argument, setting.value)))
    override = settings.get("--override-engine-args")
    if override is not None and dotted:
        raise StartupError(
            f"{override.name} and {dotted[0].origin} exclude each other: write all overrides in one of the "
            "two ways"
        )
    if override is not None:
        layers.append(Layer("override", override.value))
    filled = []
    for layer in (*layers, *dotted):
        args, empty = drop_empty(layer.args)
        notes += [f"{name} ({layer.origin}) is empty, so its default holds" for name in empty]
        filled.append(Layer(layer.origin, args))
    return merge_layers(filled)


def _check_engine_args(
    args: Mapping[str, Any], origins: Mapping[str, str], script: Any, kind: EngineKind
) -> None:
    if "model" in args:
        raise StartupError(
            f"the engine argument model ({origin_of(origins, 'model')}) is set by --model-path: remove it"
        )
    if not isinstance(script, Mapping) or (script and kind is not EngineKind.DOUBLE):
        raise StartupError(
            "the engine argument double is a mapping for --engine double: remove it, or choose that engine"
        )


def _check_options(role: Role, settings: Settings) -> CheckOptions | None:
    sources, check = fill(Sources, settings), fill(CheckOptions, settings)
    if not sources.check:
        of_check = [flag.name for flag in flags_of(CheckOptions).values()]
        stray = [name for name in of_check if name in settings and settings[name].value]
        if stray:
            raise StartupError(f"{stray[0]} is of no use without --check: add that, or remove it")
        return None
    if check.against is not None and role.other_half is None:
        raise StartupError(f"{a_role(role)} has no other side for --against: it compares prefill with decode")
    return check


def _notes(config: WorkerConfig, settings: Settings) -> list[str]:
    """Things that are allowed but probably not meant."""
    notes = [
        f"{name} is not a variable of this worker, so it is ignored" for name in unknown_variables(os.environ)
    ]
    if config.model.modality is Modality.TEXT:
        media = {flag.name for flag in GROUPS["Media"]}
        unused = [each.name for name, each in settings.items() if name in media and each.level > Level.SHARED]
        if unused:
            notes.append(
                f"{', '.join(unused)} has no effect on a text worker: --modality multimodal would serve media"
            )
    if "--publish-events-and-metrics" in settings:
        combined = settings["--publish-events-and-metrics"].name
        notes.append(f"{combined} stands for --publish-kv-events and --publish-metrics")
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
        raise StartupError(NO_DUMP) from error


def dump_engine_args(engine: EngineConfig) -> str:
    """The merged engine arguments, one `name = value  (origin)` line each, for the log and for `--check`."""
    found = sorted(leaves(engine.args))
    return "\n".join(
        f"{dotted} = {show(value, _DUMPED)}  ({origin_of(engine.origins, dotted)})" for dotted, value in found
    )
