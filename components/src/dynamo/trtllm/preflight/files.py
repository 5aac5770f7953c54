"""Whether a model's directory has what the frontend and the engine will read: nothing missing, cut short or a
pointer.

Dynamo's frontend renders the chat template and makes the token ids from files that the worker registers. A
file that it cannot use leaves a worker that serves and a model that is never listed, so it is looked at here,
before anything is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from dynamo.trtllm.config import EngineKind, Modality, WorkerConfig
from dynamo.trtllm.errors import StartupError
from dynamo.trtllm.model_files import (
    CONFIG,
    DEMO_MODELS,
    architectures_of,
    find_chat_template,
    find_json_fault,
    find_model_directory,
    find_template_fault,
    read_object,
    template_fault,
)
from dynamo.trtllm.preflight.shape import ModelShape
from dynamo.trtllm.preflight.whole import find_weight_faults

DOWNLOAD = "download the complete model"
_HUGGING_FACE_NAME = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?")
_TOKENIZERS = ("tokenizer.json", "tiktoken.model", "*.tiktoken")
"""What Dynamo's frontend can make token ids with."""
_TEXT_FILES = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "generation_config.json", "chat_template.json",
)  # fmt: skip
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


def find_file_faults(config: WorkerConfig, shape: ModelShape | None) -> Iterator[str]:
    """One sentence for each file that is missing or not whole, with its name.

    A Hugging Face name is looked at only when it has been fetched: until then what is missing may still come.
    """
    path = config.engine.model_path
    directory = find_model_directory(path)
    if directory is None:
        if path.startswith(("/", "./", "../", "~")) or Path(path).exists():
            yield f"--model-path {path} is not a directory on this machine"
        elif not _HUGGING_FACE_NAME.fullmatch(path):
            yield f"--model-path {path} is neither a directory on this machine nor a Hugging Face name"
        return
    if path not in DEMO_MODELS and not Path(path).is_dir():
        if shape is None and config.engine.kind is not EngineKind.DOUBLE:
            yield _no_decoder(path)
        return
    broken = list(_broken_files(config, directory))
    yield from broken
    yield from _missing_files(config, directory, shape, unreadable=bool(broken))
    if config.engine.kind is not EngineKind.DOUBLE and config.engine.args.get("load_format") != "dummy":
        yield from find_weight_faults(directory, f"the model directory {path}")


def _no_decoder(path: str) -> str:
    return (
        f"the config.json of {path} does not describe a decoder with attention heads and layers: "
        "give another model"
    )


def _broken_files(config: WorkerConfig, directory: Path) -> Iterator[str]:
    for name in (*_TEXT_FILES, *(_PROCESSOR_FILES if _takes_media(config) else ())):
        fault = find_json_fault(directory / name)
        if fault is not None:
            yield f"{name} of the model directory {config.engine.model_path} {fault}"


def _missing_files(
    config: WorkerConfig, directory: Path, shape: ModelShape | None, unreadable: bool
) -> Iterator[str]:
    path, served = config.engine.model_path, _serves_chat(config)
    lacks = f"the model directory {path} has no"
    if not (directory / CONFIG).is_file():
        yield f"{lacks} config.json: give the directory of a complete model"
    elif shape is None and not unreadable and config.engine.kind is not EngineKind.DOUBLE:
        yield _no_decoder(path)
    elif not unreadable and not architectures_of(read_object(directory / CONFIG)):
        yield (
            f"the config.json of {path} names no architectures, "
            f"by which engine and frontend know the model: {DOWNLOAD}"
        )
    if not any(found.is_file() for pattern in _TOKENIZERS for found in directory.glob(pattern)):
        yield (
            f"{lacks} tokenizer.json, which Dynamo's frontend makes token ids with: "
            f"{_without_tokenizer(directory)}"
        )
    elif not unreadable and not _describes_tokenizer(directory / "tokenizer.json"):
        yield f"tokenizer.json of the model directory {path} describes no tokenizer: {DOWNLOAD}"
    if served and not (directory / "tokenizer_config.json").is_file():
        yield (
            f"{lacks} tokenizer_config.json, which Dynamo's frontend reads beside the chat template: "
            f"{DOWNLOAD}"
        )
    elif served and not unreadable:
        yield from _template_faults(directory, path, config.model.custom_jinja_template)
    prepares = config.engine.kind is not EngineKind.DOUBLE and _takes_media(config)
    if prepares and not any((directory / name).is_file() for name in _PROCESSOR_FILES):
        what = "image processor" if shape is None or shape.has_vision else "feature extractor"
        yield f"{lacks} {what} ({', '.join(_PROCESSOR_FILES)}): {DOWNLOAD}"


def _describes_tokenizer(file: Path) -> bool:
    model = read_object(file).get("model")
    return not file.is_file() or (isinstance(model, Mapping) and "vocab" in model)


def _without_tokenizer(directory: Path) -> str:
    if any((directory / name).is_file() for name in ("tokenizer.model", "vocab.json", "tekken.json")):
        return (
            "convert what is there, AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) "
            "of Transformers does"
        )
    return DOWNLOAD


def _template_faults(directory: Path, path: str, own: str | None) -> Iterator[str]:
    if own is not None:
        fault = find_template_fault(Path(own))
        if fault is not None:
            yield f"the file of --custom-jinja-template {fault}"
        return
    try:
        template = find_chat_template(directory)
    except StartupError as error:
        yield f"the model directory {path} {error.message}"
        return
    if template is None:
        yield (
            f"the model directory {path} has no chat template, neither chat_template.jinja nor "
            "chat_template in tokenizer_config.json: download the complete model, give one with "
            "--custom-jinja-template FILE, or serve --endpoint-types completions only"
        )
        return
    fault = template_fault(template.text)
    if fault is not None:
        yield f"{template.file} of the model directory {path} {fault}"


def _serves_chat(config: WorkerConfig) -> bool:
    return config.role.decodes and "chat" in config.runtime.endpoint_types


def _takes_media(config: WorkerConfig) -> bool:
    return config.model.modality is Modality.MULTIMODAL and config.role.reads_media
