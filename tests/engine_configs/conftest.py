"""Tests that parse a command line start from a clean environment."""

from environment import clean_environment

__all__ = ["clean_environment"]
