"""Dynamo worker for TensorRT-LLM, multimodal first.

Owns the package's version and nothing else, so that `--help`, `--version` and every pure module import without an engine.
"""

__version__ = "0.1.0"
