"""The release that the double plays."""

from tensorrt_llm._double.release import release

__version__ = release.version
