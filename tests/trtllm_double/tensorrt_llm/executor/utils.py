"""The error of one request (executor/utils.py)."""


class RequestError(RuntimeError):
    """The engine failed one request and serves on."""
