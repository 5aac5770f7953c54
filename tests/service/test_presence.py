"""Whether a worker is still in discovery, and how it gets back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from dynamo.trtllm.service import presence
from dynamo.trtllm.service.presence import Presence, Republished
from fakes import cancelled, until

OWN, OTHER = 7, 8


class Discovery:
    """What discovery holds, a client of it, and how it takes a registration.
    `looked` counts the looks at instances."""

    def __init__(self) -> None:
        self.instances: list[int] = [OTHER, OWN]
        self.cards: list[int] = [OTHER, OWN]
        self.registered = 0
        self.refuses: Exception | None = None
        self.forgets = False
        self.looked = 0

    async def connect(self) -> Discovery:
        return self

    def instance_ids(self) -> list[int]:
        self.looked += 1
        return self.instances

    async def wait_for_instances_by_runtime_data(
        self, key: str, value: str, min_count: int, timeout_s: float
    ) -> Sequence[int]:
        if len(self.cards) < min_count:
            raise TimeoutError
        return self.cards

    async def register(self) -> None:
        self.registered += 1
        if self.refuses is not None:
            raise self.refuses
        if not self.forgets:
            self.instances, self.cards = [OTHER, OWN], [OTHER, OWN]

    def watched(self, known: bool = True) -> asyncio.Task[str]:
        return asyncio.create_task(Presence(OWN, self.connect, self.register, known).lost())

    async def looks(self, count: int) -> None:
        wanted = self.looked + count
        await until(lambda: self.looked >= wanted)


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOOK_S", "CARD_PAUSE_S"):
        monkeypatch.setattr(presence, name, 0.0)


@pytest.mark.asyncio
@pytest.mark.parametrize("missing", ["instances", "cards", "both", "all of everybody"])
async def test_what_is_missing_is_registered_again_every_time(missing: str) -> None:
    discovery = Discovery()
    watching = discovery.watched()
    for time in (1, 2):
        await discovery.looks(20)
        assert discovery.registered == time - 1
        left = [] if missing == "all of everybody" else [OTHER]
        if missing != "cards":
            discovery.instances = left
        if missing != "instances":
            discovery.cards = left
        await until(lambda time=time: discovery.registered == time)
    await discovery.looks(20)
    assert (discovery.registered, watching.done()) == (2, False)
    await cancelled(watching)


@pytest.mark.asyncio
async def test_a_discovery_that_forgets_for_a_moment_is_left_alone() -> None:
    discovery = Discovery()
    watching = discovery.watched()
    for _ in range(5):
        await discovery.looks(10)
        held, discovery.instances = discovery.instances, []
        await discovery.looks(1)
        discovery.instances = held
    assert discovery.registered == 0
    await cancelled(watching)


@pytest.mark.asyncio
async def test_an_instance_that_never_shows_up_is_registered_again() -> None:
    discovery = Discovery()
    discovery.instances = []
    watching = discovery.watched()
    await until(lambda: discovery.registered == 1)
    await cancelled(watching)


@pytest.mark.asyncio
async def test_a_discovery_that_refuses_is_asked_until_the_end_and_its_last_word_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(presence, "GIVE_UP_S", 0.02)
    discovery = Discovery()
    discovery.refuses = OSError("No space left on device")
    watching = discovery.watched()
    await discovery.looks(20)
    discovery.instances = []
    assert await asyncio.wait_for(watching, 20) == "No space left on device"
    assert discovery.registered > 1


@pytest.mark.asyncio
async def test_a_discovery_that_takes_a_registration_and_shows_none_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(presence, "GIVE_UP_S", 0.02)
    discovery = Discovery()
    discovery.forgets = True
    watching = discovery.watched()
    await discovery.looks(20)
    discovery.cards = []
    assert await asyncio.wait_for(watching, 20) == "discovery does not show what was registered"


@pytest.mark.asyncio
@pytest.mark.parametrize("shown", [("instances",), ("instances", "cards"), ()])
async def test_of_an_unknown_discovery_only_what_it_has_shown_is_missed(shown: tuple[str, ...]) -> None:
    discovery = Discovery()
    for name in {"instances", "cards"} - set(shown):
        setattr(discovery, name, [OTHER])
    watching = discovery.watched(known=False)
    await discovery.looks(30)
    assert (discovery.registered, watching.done()) == (0, False)
    for name in shown:
        setattr(discovery, name, [OTHER])
        await until(lambda: discovery.registered > 0)
    await cancelled(watching)


class Publisher:
    def __init__(self) -> None:
        self.published: list[Any] = []
        self.running = True

    def publish_stored(self, *args: Any) -> None:
        self.published.append(("stored", *args))

    def publish_removed(self, *args: Any) -> None:
        self.published.append(("removed", *args))

    def shutdown(self) -> None:
        self.running = False


def test_a_publisher_that_is_renewed_publishes_through_the_new_one_and_ends_the_old_one() -> None:
    made: list[Publisher] = []

    def create() -> Publisher:
        made.append(Publisher())
        return made[-1]

    publisher = Republished(create)
    publisher.publish_stored([1], [2])
    publisher.renew()
    publisher.publish_removed([3])
    assert [(each.published, each.running) for each in made] == [
        ([("stored", [1], [2])], False),
        ([("removed", [3])], True),
    ]
