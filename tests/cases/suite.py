"""A case: a request as data, and what a client has to see.
Loading cases, sending them, and judging the answers.

The files in `data/` hold lists of cases; README.md beside this file says what may stand in one.
Some are made here instead, one for each image file of `images.py` and each way to send it.
"""

from __future__ import annotations

import base64
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

import cases.odd_images  # noqa: F401  adds its files to those of `images`
from cases.images import BAD, GOOD, caption, png

CHAT = "/v1/chat/completions"
DATA = Path(__file__).with_name("data")
LONG_WORDS = 40_000
QUESTION = "What is in the picture?"
NEVER_SHOWN = re.compile(
    r"Traceback|File \"|0x[0-9a-f]{6}|<_io|site-packages|(?<![:/\w])/(?:root|home|usr|opt|srv)/|"
    r"\bPIL\b|pydantic|aiohttp|errno|\bKeyError|\bValueError|\bTypeError|\bNoneType",
    re.IGNORECASE,
)
"""What no error may hold: stack traces, addresses, server paths, and a library's own words."""

Verdict = Literal["right", "wrong", "worse", "dropped", "leaks"]


class Expect(BaseModel):
    """What a client has to see. `answer` is the whole text, `words` must all stand in the error's message."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    status: int | tuple[int, ...] = 200
    words: tuple[str, ...] = ()
    answer: str | None = None
    matches: str | None = None
    calls: str | None = None
    """Tools that are called, as in `Reply.calls`."""
    finish: str | None = None
    prompt_tokens: int | None = None
    hits: Mapping[str, int] = Field(default_factory=dict)


class Case(BaseModel):
    """One request. `content` is the user's message, unless `body` brings `messages`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    source: str
    content: Any = None
    body: Mapping[str, Any] = Field(default_factory=dict)
    path: str = CHAT
    expect: Expect = Expect()
    quick: bool = False
    """Part of the subset that `./tests/run.sh` runs."""
    ours_only: bool = False
    """About what only this worker promises: not asked of the rival."""


@dataclass(frozen=True)
class Reply:
    """What came back. `events` are the parsed lines of a stream."""

    status: int
    body: Any
    events: tuple[Any, ...] = ()

    @property
    def text(self) -> str:
        if not any(each.get("choices") for each in self.events or (self.body,)):
            return "".join(map(_text_of_another_interface, self.events or (self.body,)))
        pieces = [choice for each in self.events or (self.body,) for choice in each.get("choices") or ()]
        return "".join(
            str((piece.get("delta") or piece.get("message") or {}).get("content") or piece.get("text") or "")
            for piece in pieces
        )

    @property
    def calls(self) -> str:
        """The name of each tool that is called, and its arguments: `look {"at": "it"}`."""
        found = ""
        for each in self.events or (self.body,):
            for choice in each.get("choices") or ():
                for call in (choice.get("delta") or choice.get("message") or {}).get("tool_calls") or ():
                    function = call["function"]
                    found += f"{function['name']} " if function.get("name") else ""
                    found += function.get("arguments") or ""
        return found

    @property
    def message(self) -> str:
        """The error's own words, wherever they stand."""
        return (
            ""
            if self.status == 200 and self.error is None
            else json.dumps(self.error or self.body, ensure_ascii=False)
        )

    @property
    def error(self) -> Any:
        """An error that came as an event of a stream, or in a body."""
        found = [
            each for each in (*self.events, self.body) if isinstance(each, Mapping) and each.get("error")
        ]
        return found[0]["error"] if found else None

    @property
    def finish(self) -> str | None:
        pieces = [choice for each in self.events or (self.body,) for choice in each.get("choices") or ()]
        return next(
            (piece["finish_reason"] for piece in reversed(pieces) if piece.get("finish_reason")), None
        )

    @property
    def usages(self) -> list[Mapping[str, Any]]:
        """Of every chunk that carries usage."""
        return [each["usage"] for each in self.events or (self.body,) if each.get("usage")]


def _text_of_another_interface(event: Mapping[str, Any]) -> str:
    """The text in a body, or in an event of a stream, of `/v1/messages` and `/v1/responses`."""
    delta = event.get("delta")
    if event.get("type") in ("content_block_delta", "response.output_text.delta"):
        return str(delta.get("text") or "" if isinstance(delta, Mapping) else delta)
    holders = [event, *(event.get("output") or ())]
    parts = [part for each in holders for part in each.get("content") or () if isinstance(part, Mapping)]
    return "".join(str(part.get("text") or "") for part in parts)


@dataclass(frozen=True)
class Result:
    """One case in one form, judged."""

    case: str
    source: str
    streamed: bool
    verdict: Verdict
    status: int
    reason: str = ""
    shown: str = field(default="", repr=False)


def load_cases() -> list[Case]:
    """All cases, in the order of their files. Raises `ValueError` for two of one name."""
    found = []
    for file in sorted(DATA.glob("*.yaml")):
        text = file.read_text(encoding="utf-8").replace("{caption}", caption())
        page = yaml.safe_load(text)
        found += [Case(**{"source": page["source"], **each}) for each in page["cases"]]
    found += _image_cases()
    names = [case.id for case in found]
    if len(set(names)) != len(names):
        raise ValueError(f"cases with one name: {sorted({name for name in names if names.count(name) > 1})}")
    return found


def _image_cases() -> Iterator[Case]:
    """Every image file, inside the request and from a web server."""
    for name in GOOD:
        for way, image in (
            ("inline", {"file": name}),
            ("from the web", {"page": f"/good/{name.replace(' ', '-')}"}),
        ):
            yield Case(
                id=f"{name}, {way}",
                source="formats that clients send",
                content=[{"text": QUESTION}, {"image": image}],
                expect=Expect(answer=caption()),
                quick=way == "inline" and name in ("png", "tiff lzw", "png with a large compressed text"),
            )
    for name in BAD:
        for way, image in (
            ("inline", {"file": name}),
            ("from the web", {"page": f"/bad/{name.replace(' ', '-')}"}),
        ):
            yield Case(
                id=f"{name}, {way}",
                source="files that are no image",
                content=[{"text": QUESTION}, {"image": image}],
                expect=Expect(status=400, words=("image",)),
                quick=way == "inline" and name in ("html page", "half a png"),
            )


def request_body(case: Case, model: str, media_url: str, folder: Path, *, stream: bool) -> dict[str, Any]:
    """The JSON of a request: parts written out, the model named."""
    body = _written_out(dict(case.body), media_url, folder)
    if case.content is not None:
        content = (
            case.content
            if isinstance(case.content, str)
            else [_part(each, media_url, folder) for each in case.content]
        )
        body.setdefault("messages", [{"role": "user", "content": content}])
    if stream:
        body["stream"] = True
        if case.path in (CHAT, "/v1/completions"):
            body.setdefault("stream_options", {"include_usage": True})
    most = "max_output_tokens" if case.path == "/v1/responses" else "max_tokens"
    return {"model": model, most: 40, **body}


def _written_out(value: Any, media_url: str, folder: Path) -> Any:
    """`value` with each part in our short form replaced by OpenAI's form."""
    if isinstance(value, Mapping):
        if len(value) == 1 and next(iter(value)) in ("image", "raw"):
            return _part(value, media_url, folder)
        return {key: _written_out(each, media_url, folder) for key, each in value.items()}
    if isinstance(value, list):
        return [_written_out(each, media_url, folder) for each in value]
    return value.replace("{png}", base64.b64encode(png()).decode()) if isinstance(value, str) else value


def _part(part: Mapping[str, Any], media_url: str, folder: Path) -> dict[str, Any]:
    if "text" in part:
        return {"type": "text", "text": part["text"].replace("{long}", "word " * LONG_WORDS)}
    if "image" in part:
        return {"type": "image_url", "image_url": {"url": _url(part["image"], media_url, folder)}}
    return dict(json.loads(json.dumps(part["raw"]).replace("{media}", media_url)))


def _url(image: Mapping[str, str], media_url: str, folder: Path) -> str:
    if "page" in image:
        return media_url + image["page"]
    if "file" in image:
        data = {**GOOD, **BAD}[image["file"]]()
        return f"data:{image.get('type', 'image/png')};base64,{base64.b64encode(data).decode()}"
    return image["url"].replace("{media}", media_url).replace("{folder}", str(folder))


def send(url: str, body: Any, timeout_s: float) -> Reply:
    """POST `body` as JSON. A connection that ends or hangs is a reply of status 0."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return _read(answer.status, answer.headers.get("Content-Type", ""), answer.read().decode())
    except urllib.error.HTTPError as error:
        return _read(error.code, "", error.read().decode(errors="replace"))
    except (OSError, TimeoutError) as error:
        return Reply(0, {"error": type(error).__name__})


def _read(status: int, kind: str, text: str) -> Reply:
    if not kind.startswith("text/event-stream"):
        try:
            return Reply(status, json.loads(text))
        except ValueError:
            return Reply(status, {"message": text})
    lines = [line[5:].strip() for line in text.splitlines() if line.startswith("data:")]
    events = tuple(json.loads(line) for line in lines if line not in ("", "[DONE]"))
    return Reply(status, {}, events)


def judge(case: Case, reply: Reply, *, answers: bool = True) -> tuple[Verdict, str]:
    """Whether `reply` is what the case expects, and what is not.
    Without `answers`, texts and counts are not looked at."""
    expect = case.expect
    wanted = expect.status if isinstance(expect.status, tuple) else (expect.status,)
    failed = reply.status != 200 or reply.error is not None
    if failed and NEVER_SHOWN.search(reply.message):
        return "leaks", f"the error shows {NEVER_SHOWN.search(reply.message)!r}"
    if reply.status not in wanted or (reply.status == 200 and reply.error is not None):
        client_fault = all(400 <= status < 500 for status in wanted)
        worse = reply.status == 0 or (client_fault and reply.status >= 500)
        return ("worse" if worse else "wrong"), f"status {reply.status}, not {expect.status}"
    missing = [word for word in expect.words if word.lower() not in reply.message.lower()]
    if missing:
        return "wrong", f"the message does not name {missing}"
    return ("right", "") if failed else _judge_answer(expect, reply, answers)


def _judge_answer(expect: Expect, reply: Reply, answers: bool) -> tuple[Verdict, str]:
    if not reply.text and not reply.calls and expect.answer != "":
        return "dropped", "a 200 with nothing in it"
    if not answers:
        return "right", ""
    checks: Sequence[tuple[str, Any, Any]] = (
        ("answer", expect.answer, reply.text),
        ("tool calls", expect.calls, reply.calls),
        ("finish reason", expect.finish, reply.finish),
        *(
            ("prompt tokens", expect.prompt_tokens, usage.get("prompt_tokens"))
            for usage in reply.usages or ({},)
        ),
    )
    for name, want, got in checks:
        if want is not None and want != got:
            return "wrong", f"{name} {got!r}, not {want!r}"
    if expect.matches is not None and not re.search(expect.matches, reply.text):
        return "wrong", f"the answer {reply.text!r} does not match {expect.matches!r}"
    return "right", ""
