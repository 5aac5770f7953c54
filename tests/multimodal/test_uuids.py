"""Names of contents: each for its tenant and its kind, bounded in number."""

from __future__ import annotations

import pytest

from dynamo.trtllm.multimodal import uuids
from dynamo.trtllm.multimodal.parts import MediaPart
from dynamo.trtllm.multimodal.uuids import NamedContent, Uuids


def part(uuid: str, kind: str = "image", tenant: str | None = None) -> MediaPart:
    return MediaPart(1, kind, "", uuid, tenant)


def test_a_name_means_something_to_its_own_tenant_and_kind_alone() -> None:
    names = Uuids()
    names.remember(part("u", "image", "t"), NamedContent("a", False))
    names.remember(part("u", "video", "t"), NamedContent("b", False))
    names.remember(part("u", "image", "s"), NamedContent("c", True))
    assert names.find(part("u", "image", "t")) == NamedContent("a", False)
    assert names.find(part("u", "video", "t")) == NamedContent("b", False)
    assert names.find(part("u", "image", "s")) == NamedContent("c", True)
    for other in (part("u"), part("u", "image", ""), part("v", "image", "t"), part("t", "image", "u")):
        assert names.find(other) is None


def test_a_name_means_what_it_was_given_last() -> None:
    names = Uuids()
    for digest in ("a", "b"):
        names.remember(part("u"), NamedContent(digest, False))
        assert names.find(part("u")) == NamedContent(digest, False)


def test_names_that_nobody_uses_leave_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uuids, "MAX_NAMES", 2)
    names = Uuids()
    names.remember(part("a"), NamedContent("1", False))
    names.remember(part("b"), NamedContent("2", False))
    names.find(part("a"))
    names.remember(part("c\udcff"), NamedContent("3", False))
    assert [names.find(part(each)) is not None for each in ("a", "b", "c\udcff")] == [True, False, True]
