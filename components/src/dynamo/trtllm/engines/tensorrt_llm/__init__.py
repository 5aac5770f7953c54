"""The TensorRT-LLM engine: the only package that imports `tensorrt_llm`,
and it does so when the engine starts."""
