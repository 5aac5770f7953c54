"""The quick cases in the topology with the most workers; `tests/cases/run` asks all of them, anywhere."""

from __future__ import annotations

from pathlib import Path

from cases.files import write_files
from cases.media import media_server
from cases.run import deployment, run_cases
from cases.suite import Case, Expect, Reply, judge, load_cases
from processes.cluster import free_port


def test_the_quick_cases_are_all_right_with_encode_prefill_and_decode_workers(tmp_path: Path) -> None:
    quick = [case for case in load_cases() if case.quick]
    write_files(tmp_path)
    with media_server(free_port()) as media, deployment("epd_disagg", tmp_path) as url:
        results = list(run_cases(quick, url, "demo", media, tmp_path))
    assert len(results) >= len(quick)
    assert [each for each in results if each.verdict != "right"] == []


def test_there_are_at_least_six_hundred_cases_and_each_has_a_source() -> None:
    cases = load_cases()
    assert len(cases) >= 600
    assert all(case.source for case in cases)


def test_the_judge_tells_wrong_worse_dropped_and_leaking_answers_from_right_ones() -> None:
    refused = Case(id="x", source="x", content="x", expect=Expect(status=400, words=("image",)))
    answered = Case(id="x", source="x", content="x", expect=Expect(answer="a circle"))

    def told(case: Case, status: int, body: object) -> str:
        return judge(case, Reply(status, body))[0]

    def message(text: str) -> dict[str, object]:
        return {"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}

    assert told(refused, 400, {"message": "image 1: no"}) == "right"
    assert told(refused, 400, {"message": "no"}) == "wrong"
    assert told(refused, 200, message("a circle")) == "wrong"
    assert told(refused, 500, {"message": "image 1: no"}) == "worse"
    assert told(refused, 0, {"error": "TimeoutError"}) == "worse"
    assert told(refused, 400, {"message": "image 1: Traceback (most recent call last)"}) == "leaks"
    assert told(refused, 400, {"message": "image in /home/me/x.png"}) == "leaks"
    assert told(answered, 200, message("a circle")) == "right"
    assert told(answered, 200, message("a square")) == "wrong"
    assert told(answered, 200, message("")) == "dropped"
    assert (
        judge(answered, Reply(200, {}, ({"choices": []}, {"error": {"message": "it broke"}})))[0] == "wrong"
    )
