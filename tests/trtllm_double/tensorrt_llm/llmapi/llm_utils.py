"""Merging of engine arguments with a YAML file (llmapi/llm_utils.py, early 1.3: a shallow union,
`kv_cache_config` merged)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def update_llm_args_with_extra_dict(
    llm_args: dict[str, Any], llm_args_dict: dict[str, Any], extra_llm_api_options: str | None = None
) -> dict[str, Any]:
    """The dictionary wins; only `kv_cache_config` keeps what was set before and is not named in it."""
    from tensorrt_llm.llmapi import llm_args as classes

    merged = {**llm_args, **llm_args_dict}
    given = llm_args_dict.get("kv_cache_config")
    if isinstance(given, dict):
        base = llm_args.get("kv_cache_config")
        before = base.model_dump(exclude_unset=True) if hasattr(base, "model_dump") else dict(base or {})
        merged["kv_cache_config"] = classes.KvCacheConfig(**{**before, **given})
    return merged


def update_llm_args_with_extra_options(
    llm_args: dict[str, Any], extra_llm_api_options: str | None
) -> dict[str, Any]:
    if not extra_llm_api_options:
        return llm_args
    content = yaml.safe_load(Path(extra_llm_api_options).read_text(encoding="utf-8")) or {}
    return update_llm_args_with_extra_dict(llm_args, content, extra_llm_api_options)
