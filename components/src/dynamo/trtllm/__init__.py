"""Dynamo worker for TensorRT-LLM, multimodal first.

Owns the package's version and project address and nothing else, so that `--help`,
`--version` and every pure module import without an engine.
"""

__version__ = "0.1.0"
PROJECT_URL = "https://github.com/ai-dynamo/dynamo"
"""Where the operator of an image host may ask about this worker's downloads;
as `Homepage` in `pyproject.toml`."""
