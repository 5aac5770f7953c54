"""The error of one request."""


class RequestError(RuntimeError):
    """The engine failed one request and serves on."""
