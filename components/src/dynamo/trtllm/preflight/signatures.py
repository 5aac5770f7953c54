"""Prints the installed TensorRT-LLM's signatures as a line of JSON;
`report` runs it as a process, since importing is heavy."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Mapping
from typing import Any

from dynamo.trtllm.engines.tensorrt_llm.library import Library, load_library, nested_fields


def read_signatures(library: Library) -> dict[str, Any]:
    """Names in each group of the record, as the installed release has them."""
    groups: dict[str, list[str]] = {
        "LLM arguments": list(library.argument_fields),
        "LLM.generate_async": sorted(library.generate_parameters - {"self"}),
        "SamplingParams": _fields(library.sampling_params),
        "GuidedDecodingParams": _fields(library.guided_decoding_params),
        "DisaggregatedParams": sorted(library.disaggregated_fields),
        "LLM methods": [name for name in dir(library.llm) if not name.startswith("_")],
    }
    for name, field in library.argument_fields.items():
        nested = nested_fields(field)
        if nested is not None:
            groups[name] = sorted(nested)
    return {"version": library.version, "groups": groups}


def _fields(kind: Any) -> list[str]:
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    fields = getattr(kind, "model_fields", None)
    return (
        list(fields)
        if isinstance(fields, Mapping)
        else [name for name in inspect.signature(kind).parameters if name != "self"]
    )


if __name__ == "__main__":
    print(json.dumps(read_signatures(load_library())))
