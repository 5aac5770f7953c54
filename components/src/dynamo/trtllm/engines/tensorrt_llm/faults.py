"""Whose fault an exception of the library is. Nothing that a request holds is the engine's death: `health`
alone knows that."""

from __future__ import annotations

from dynamo.trtllm.errors import ClientFault, EngineFault, WorkerError

REFUSALS: tuple[type[BaseException], ...] = (
    ValueError, TypeError, OverflowError, AssertionError, NotImplementedError,
)  # fmt: skip
"""What the library raises for a request of text that it does not take. Processors of media raise anything
at all."""


def refused(
    error: BaseException, request_error: type[BaseException], images: int, encoded: bool
) -> WorkerError:
    """For what was raised while a request was prepared and submitted, with that many `images`."""
    if _out_of_memory(error):
        return EngineFault("the engine has no memory left for this request")
    if encoded and images > 1 and isinstance(error, NotImplementedError):
        return ClientFault(
            "this release takes one encoded image a request for this model: send a single one"
        )
    if images:
        return ClientFault("the engine refused this request's prompt, media or options")
    if isinstance(error, (*REFUSALS, request_error)):
        return ClientFault("the engine refused this request's prompt or options")
    return EngineFault("the engine failed to take this request")


def refused_image(error: BaseException) -> WorkerError:
    """For what was raised while an encode worker prepared an image."""
    if _out_of_memory(error):
        return EngineFault("the encoder has no memory left for an image")
    return ClientFault("the model's image processor refused this image: send it in another size")


def _out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__
