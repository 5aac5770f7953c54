"""Dynamo's own runtime options (`--namespace`, `--endpoint`, `--discovery-backend`, ...): read, checked, and
put into our layers. Their names, variables and help are Dynamo's.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dynamo.trtllm.config import MEBIBYTE, Role, RuntimeConfig, default_endpoint
from dynamo.trtllm.errors import StartupError
from dynamo.trtllm.utils.command_line import build_parser, refuse_unknown
from dynamo.trtllm.utils.flags import FLAGS
from dynamo.trtllm.utils.settings import Given, Level, Settings, convert, fields_of, truth_of
from dynamo.trtllm.values import ENDPOINT, GIGABYTES, JSON_OBJECT

NO_DUMP = "the file of --dump-config-to cannot be written: give a path in a directory that exists"
_PAYLOAD_BYTES = 1 << 20
_CACHE = "--multimodal-embedding-cache-capacity-gb"


class DynamoOptions(NamedTuple):
    """Dynamo's `DynamoRuntimeConfig`, validated; variables that its Rust side is to find (None: unset)."""

    values: Any
    environment: Mapping[str, str | None]


def parse_flags(arguments: Sequence[str]) -> tuple[list[Given], DynamoOptions]:
    """What was given of our own flags, in order, and Dynamo's options."""
    from dynamo.common.configuration.groups.runtime_args import DynamoRuntimeArgGroup, DynamoRuntimeConfig

    parser = build_parser()
    try:
        DynamoRuntimeArgGroup().add_arguments(parser)
    except (ValueError, argparse.ArgumentTypeError) as error:
        variables = _variables_in(str(error))
        raise StartupError(
            f"{variables} has a value of the wrong kind: --help says which it takes"
        ) from error
    namespace, unknown = parser.parse_known_args(arguments)
    refuse_unknown(unknown, [each for each in parser._option_string_actions if each.startswith("--")])
    given = getattr(namespace, "given", [])
    for action in parser._actions:
        value = getattr(namespace, action.dest, None)
        if action.choices is not None and value is not None and value not in action.choices:
            wanted = ", ".join(map(str, action.choices))
            raise StartupError(f"{_variables_in(repr(value))} must be one of {wanted}, not {value!r}")
    _apply_old_spellings(namespace, given, arguments)
    values = DynamoRuntimeConfig.from_cli_args(namespace)
    changes = _validate(values)
    if values.engine_request_limit is not None:
        changes["DYN_ENGINE_REQUEST_LIMIT"] = str(values.engine_request_limit)
    return given, DynamoOptions(values, changes)


def _validate(values: Any) -> dict[str, str | None]:
    """Let Dynamo check its options. It writes some into the environment: they are taken out, and returned."""
    before = dict(os.environ)
    try:
        values.validate()
    except ValueError as error:
        raise StartupError(f"{error}") from error
    finally:
        changes = {
            name: os.environ.get(name)
            for name in {*before, *os.environ}
            if os.environ.get(name) != before.get(name)
        }
        for name in changes:
            os.environ.pop(name, None)
            os.environ.update({name: before[name]} if name in before else {})
    return changes


def _variables_in(text: str) -> str:
    """The variables of Dynamo whose value stands in quotes in `text`; Dynamo itself does not name them."""
    given = sorted(
        name for name, value in os.environ.items() if name.startswith("DYN_") and repr(value) in text
    )
    return " or ".join(given) or "a variable of Dynamo's runtime options"


def _apply_old_spellings(
    namespace: argparse.Namespace, given: Sequence[Given], arguments: Sequence[str]
) -> None:
    """Dynamo 0.8's `--store-kv` and DYN_STORE_KV stand in for `--discovery-backend` and its variable."""
    stores = [convert(each).value for each in given if each.flag.name == "--store-kv"]
    named = any(argument.partition("=")[0] == "--discovery-backend" for argument in arguments)
    if stores and named and stores[-1] != namespace.discovery_backend:
        raise StartupError(
            "--store-kv and --discovery-backend contradict each other: keep --discovery-backend"
        )
    variable = os.environ.get("DYN_STORE_KV")
    if stores:
        namespace.discovery_backend = stores[-1]
    elif variable and not named and "DYN_DISCOVERY_BACKEND" not in os.environ:
        old = Given(FLAGS["--store-kv"], variable, "DYN_STORE_KV", Level.VARIABLE)
        namespace.discovery_backend = convert(old).value


def runtime_layer(role: Role, options: DynamoOptions, settings: Settings) -> RuntimeConfig:
    """How the worker meets Dynamo. Raises `StartupError` for options that have no effect or no sense here."""
    values = options.values
    _refuse_without_effect(values)
    endpoint = _endpoint(role, values)
    indexer = truth_of(os.environ, "DYN_LOCAL_INDEXER", RuntimeConfig.enable_local_indexer)
    return RuntimeConfig(
        **{"enable_local_indexer": indexer, **fields_of(RuntimeConfig, settings)},
        namespace=endpoint.removeprefix("dyn://").partition(".")[0],
        endpoint=endpoint,
        discovery_backend=values.discovery_backend,
        request_plane=values.request_plane,
        response_plane=values.response_plane,
        event_plane=values.event_plane,
        endpoint_types=_endpoint_types(values.endpoint_types),
        pushes_chunks=not truth_of(os.environ, "DYN_TRTLLM_PULL_EGRESS"),
        exclude_tools_when_tool_choice_none=values.exclude_tools_when_tool_choice_none,
        default_thinking_mode=values.dyn_default_thinking_mode,
        structural_tag=values.structural_tag,
        kv_state_endpoint=values.kv_state_endpoint,
        health_check_payload=_health_check_payload(values.health_check_payload),
        dump_config_to=_dump_file(values.dump_config_to),
        hands_files_over=_hands_files_over(values.discovery_backend),
        environment=options.environment,
    )


def _hands_files_over(discovery_backend: str) -> bool:
    """Discovery by a directory or within a process is for one machine. Else a worker's files reach a frontend
    by the worker's status port alone (`DYN_SELF_HOST_METADATA`, on by default in Dynamo 1.6.1)."""
    if discovery_backend in ("file", "mem"):
        return True
    has_port = os.environ.get("DYN_SYSTEM_PORT", "").strip() not in ("", "-1")
    return has_port and truth_of(os.environ, "DYN_SELF_HOST_METADATA", True)


def _endpoint(role: Role, values: Any) -> str:
    endpoint = values.endpoint or default_endpoint(role, values.namespace)
    try:
        return ENDPOINT.convert(endpoint)
    except ValueError:
        if values.endpoint:
            raise StartupError(f"--endpoint must be {ENDPOINT.wanted}, not {endpoint!r}") from None
        wanted = "a word without spaces, dots and slashes"
        raise StartupError(
            f"--namespace (DYN_NAMESPACE) must be {wanted}, not {values.namespace!r}"
        ) from None


def _refuse_without_effect(values: Any) -> None:
    if [name for name in values.connector if name not in ("none", "null")]:
        raise StartupError("--connector must be none: this worker has no KV cache connector")
    if [name for name in values.output_modalities if name.lower() != "text"]:
        raise StartupError("--output-modalities must be text: this worker generates nothing else")
    if values.multimodal_embedding_cache_publisher:
        raise StartupError(
            "--multimodal-embedding-cache-publisher is not available in this worker: remove it"
        )
    if values.fpm_trace:
        raise StartupError("--fpm-trace is not available in this worker: remove it")


def _endpoint_types(text: str) -> tuple[str, ...]:
    """Names of endpoints to serve; `none` alone is no endpoint at all."""
    names = tuple(dict.fromkeys(name.strip().lower() for name in text.split(",") if name.strip()))
    if names == ("none",):
        return ()
    if not names or not set(names) <= {"chat", "completions"}:
        raise StartupError(
            f"--endpoint-types must be chat, completions, both with a comma, or none, not {text!r}"
        )
    return names


def _health_check_payload(text: str | None) -> Mapping[str, Any] | None:
    """A JSON object, or `@FILE` with one in it."""
    if not text:
        return None
    try:
        return JSON_OBJECT.convert(_read_payload(Path(text[1:])) if text.startswith("@") else text)
    except (OSError, ValueError) as error:
        raise StartupError("--health-check-payload must be a JSON object, or @FILE with one in it") from error


def _read_payload(path: Path) -> str:
    """At most `_PAYLOAD_BYTES`; devices and pipes may have no end. Raises `OSError` and `ValueError`."""
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
        raise StartupError(NO_DUMP)
    return text


def model_fields(options: DynamoOptions) -> dict[str, Any]:
    """What Dynamo's options say about the model's text."""
    template = options.values.custom_jinja_template
    if template:
        template = os.path.expanduser(os.path.expandvars(template))
        if not os.path.isfile(template):
            raise StartupError(
                "the file of --custom-jinja-template does not exist: give the path of a Jinja template"
            )
    return {
        "custom_jinja_template": template or None,
        "tool_call_parser": options.values.dyn_tool_call_parser,
        "reasoning_parser": options.values.dyn_reasoning_parser,
    }


def cache_bytes(options: DynamoOptions) -> int | None:
    """The cache of media as Dynamo's flag of it says; None where that says nothing."""
    gigabytes = options.values.multimodal_embedding_cache_capacity_gb
    if not gigabytes:
        return None
    try:
        return int(GIGABYTES.convert(str(gigabytes)) * 1024 * MEBIBYTE)
    except ValueError:
        raise StartupError(f"{_CACHE} must be {GIGABYTES.wanted}, or 0 for none, not {gigabytes}") from None
