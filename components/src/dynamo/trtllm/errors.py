"""What can go wrong, as one tree, and the one table that turns it into Dynamo's exceptions.

Four branches: the client's fault, a peer's fault, the engine's fault, and what ends the process. Messages are
our own words and safe to show: no library text, no address, no server path, no payload. The cause stays
attached (`raise ... from`) for the log. This module knows nothing about requests, engines or transports.
"""

from __future__ import annotations


class WorkerError(Exception):
    """Root of the tree. `message` is one sentence that a user can act on."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ClientFault(WorkerError):
    """The request cannot be served as it is; the client reads `message` in a 400."""


class PartFault(ClientFault):
    """One media part of the request is at fault.

    `position` counts the request's parts of that kind from 1, in the order in which they were sent.
    """

    def __init__(self, position: int, message: str, *, kind: str) -> None:
        super().__init__(f"{kind} {position}: {message}")
        self.position = position


class LimitFault(ClientFault):
    """A documented limit is exceeded: number of parts, bytes, pixels or context length."""


def require_room(tokens: int, context_length: int, *, with_media: bool = False) -> None:
    """Raise `LimitFault`, naming both counts, for a prompt of `tokens`
    that leaves no room for a single output token."""
    if tokens >= context_length:
        media = " with its media" if with_media else ""
        raise LimitFault(f"the prompt has {tokens} tokens{media}; the context length is {context_length}")


class PeerFault(WorkerError):
    """Another worker that this request needs did not do its part."""


class PeerUnavailable(PeerFault):
    """No live peer took the request; the client may try again (503)."""


class PeerTimeout(PeerFault):
    """A peer or a transfer outlasted its deadline (504)."""


class Overloaded(WorkerError):
    """A bounded resource stayed full until the deadline;
    the client may try again (504, as the time is used up)."""


class EngineFault(WorkerError):
    """The engine failed this request and serves on (500)."""


class WorkerDead(WorkerError):
    """This process can serve nothing any more: running requests end with a 503 and it exits."""


class EngineDead(WorkerDead):
    """The engine is gone."""


class TransferDead(WorkerDead):
    """Nothing can be handed over any more: the transfer's library does not return."""


class ShuttingDown(WorkerError):
    """The worker leaves; the request belongs to another instance (503)."""


class RequestCancelled(WorkerError):
    """The client went away. Nobody reads the answer, so this is not a fault."""


class StartupError(WorkerError):
    """The worker cannot start as configured; `message` says what to change.
    Ends the process with exit code 2."""


def to_dynamo(error: BaseException) -> BaseException:
    """Translate `error` into the exception that makes Dynamo's frontend answer with the right status.

    400 with our words: `InvalidArgument`; 503: `CannotConnect`, or `EngineShutdown` where this instance has
    to be avoided; 504: `ConnectionTimeout`; 499: `Cancelled`; 500: everything else. Source: the mapping
    observed on ai-dynamo 1.6.1, where only `InvalidArgument` carries its text to the client.
    """
    from dynamo.llm import exceptions as dynamo

    if isinstance(error, dynamo.DynamoException):
        return error
    table: tuple[tuple[type[WorkerError], type[BaseException]], ...] = (
        (ClientFault, dynamo.InvalidArgument),
        (PeerTimeout, dynamo.ConnectionTimeout),
        (PeerFault, dynamo.CannotConnect),
        (Overloaded, dynamo.ConnectionTimeout),
        (WorkerDead, dynamo.EngineShutdown),
        (ShuttingDown, dynamo.EngineShutdown),
        (RequestCancelled, dynamo.Cancelled),
    )
    for ours, theirs in table:
        if isinstance(error, ours):
            return theirs(error.message)
    message = error.message if isinstance(error, WorkerError) else "the worker failed on this request"
    return dynamo.Unknown(message)
