"""Sounds in the portable engine: prompts and spectrograms are those of Transformers' processor,
tokens those of `generate`."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from dynamo.trtllm.audio_rule import AudioRule
from dynamo.trtllm.config import EngineConfig, Modality
from dynamo.trtllm.core import DecodedAudio, DecodedImage, MediaShape, Prompt
from dynamo.trtllm.engines.transformers.audio import AudioEncoder
from dynamo.trtllm.engines.transformers.engine import TransformersEngine
from dynamo.trtllm.engines.transformers.loading import load_model
from dynamo.trtllm.engines.transformers.options import EngineOptions
from dynamo.trtllm.errors import ClientFault, LimitFault, PartFault, StartupError
from dynamo.trtllm.multimodal_processor import expand
from engines.contract import as_it_arrives, generate, request, split
from engines.families import (
    AUDIO,
    LONGEST_SOUND_S,
    SOUND_RATE,
    make_tiny_engine,
    noise_image,
    random_sound,
    reference_model,
    reference_tokens,
    save_tiny_model,
    saved_processor,
)

FAMILY = "qwen2_audio"
OUTPUT_TOKENS = 16
SHORTEST = 321
"""Samples: three frames of a spectrogram, of which one row of features is made."""
TWO_ROWS = 961
"""With one row alone `generate` takes a prompt for one that nothing has expanded (Transformers 5.24)."""
LONGEST = LONGEST_SOUND_S * SOUND_RATE
SOUND = {"type": "audio", "audio_url": "sound"}


def sized(seed: int, samples: int) -> DecodedAudio:
    return random_sound(seed, samples / SOUND_RATE)


def turn(role: str, *content: Any) -> dict[str, Any]:
    parts = [SOUND if each is SOUND else {"type": "text", "text": each} for each in content]
    return {"role": role, "content": parts}


CONVERSATIONS: tuple[tuple[list[dict[str, Any]], tuple[DecodedAudio, ...]], ...] = (
    ([turn("user", "Hello.")], ()),
    ([turn("user", SOUND, "What is it?")], (random_sound(1, 0.7),)),
    ([turn("user", "What is it?", SOUND)], (random_sound(2, 1.3),)),
    ([turn("user", SOUND, "and", SOUND, "differ?")], (random_sound(3, 0.25), random_sound(4, 1.99))),
    (
        [turn("user", SOUND, "What?"), turn("assistant", "A bell."), turn("user", "And this?", SOUND)],
        (random_sound(5, 0.5), random_sound(6, 1.0)),
    ),
    ([turn("system", "Be brief."), turn("user", SOUND)], (random_sound(7, 0.9),)),
    ([turn("user", SOUND, "Short?")], (sized(8, TWO_ROWS),)),
    ([turn("user", SOUND, "Long?")], (sized(9, LONGEST),)),
)


class Subject:
    """A started engine, and the same weights in Transformers."""

    def __init__(self, engine: TransformersEngine, reference: Any, directory: Path) -> None:
        self.engine, self.reference = engine, reference
        self.processor = saved_processor(directory)

    def text(self, turns: Sequence[dict[str, Any]]) -> str:
        return str(self.processor.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))

    async def prompt(self, turns: Sequence[dict[str, Any]], sounds: Sequence[DecodedAudio]) -> Prompt:
        """The prompt that a worker makes of the frontend's ids."""
        ids = self.processor.tokenizer.encode(self.text(turns), add_special_tokens=False)
        return expand(ids, {"audio": AUDIO}, await self.engine.encode(sounds) if sounds else [])

    def prepared(self, turns: Sequence[dict[str, Any]], sounds: Sequence[DecodedAudio]) -> Any:
        """What Transformers' processor makes of the text and all its sounds."""
        heard = {"audio": [sound.samples for sound in sounds], "sampling_rate": SOUND_RATE} if sounds else {}
        return self.processor(text=self.text(turns), return_tensors="pt", **heard)

    def expected(self, ids: Sequence[int], sounds: Sequence[DecodedAudio]) -> list[int]:
        return reference_tokens(self.reference, self.processor, FAMILY, ids, (), OUTPUT_TOKENS, sounds=sounds)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = save_tiny_model(FAMILY, tmp_path_factory.mktemp(FAMILY))
    return directory, reference_model(directory, FAMILY)


@pytest_asyncio.fixture
async def subject(saved: tuple[Path, Any]) -> AsyncIterator[Subject]:
    directory, reference = saved
    engine = make_tiny_engine(directory, FAMILY)
    await engine.start()
    yield Subject(engine, reference, directory)
    await engine.close()


@pytest.mark.asyncio
async def test_prompts_of_eight_conversations_are_those_of_the_processor(subject: Subject) -> None:
    shortest = (CONVERSATIONS[1][0], (sized(10, SHORTEST),))
    for turns, sounds in (*CONVERSATIONS, shortest):
        prompt = await subject.prompt(turns, sounds)
        assert list(prompt.token_ids) == subject.prepared(turns, sounds)["input_ids"][0].tolist(), turns
        assert len(prompt.media) == len(sounds)


@pytest.mark.asyncio
async def test_spectrograms_are_those_of_the_processor(subject: Subject, saved: tuple[Path, Any]) -> None:
    config = EngineConfig(modality=Modality.MULTIMODAL, device="cpu", torch_threads=1)
    encoder = AudioEncoder(load_model(str(saved[0]), config, EngineOptions()))
    for turns, sounds in CONVERSATIONS[1:]:
        theirs = subject.prepared(turns, sounds)
        ours = [encoder.preprocess(sound).tensors for sound in sounds]
        torch.testing.assert_close(
            torch.cat([each["input_features"] for each in ours]), theirs["input_features"], rtol=0, atol=1e-6
        )
        heard = torch.cat([each["heard"] for each in ours])
        assert torch.equal(heard, theirs["feature_attention_mask"])


@pytest.mark.asyncio
async def test_eight_conversations_at_once_get_the_tokens_that_generate_gives_each_alone(
    subject: Subject,
) -> None:
    prompts = [await subject.prompt(turns, sounds) for turns, sounds in CONVERSATIONS]
    asked = [
        request(p.token_ids, media=p.media, request_id=str(i), max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        for i, p in enumerate(prompts)
    ]
    outputs = await asyncio.gather(*(generate(subject.engine, each) for each in asked))
    pairs = zip(prompts, CONVERSATIONS, strict=True)
    expected = [subject.expected(prompt.token_ids, sounds) for prompt, (_, sounds) in pairs]
    assert [output.token_ids for output in outputs] == expected
    assert len({tuple(tokens) for tokens in expected}) == len(expected)


@pytest.mark.asyncio
async def test_another_sound_in_the_same_prompt_gets_another_answer(subject: Subject) -> None:
    turns, answers = CONVERSATIONS[1][0], []
    for seed in (1, 11):
        prompt = await subject.prompt(turns, [random_sound(seed, 0.7)])
        asked = request(prompt.token_ids, media=prompt.media, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        answers.append((await generate(subject.engine, asked)).token_ids)
    assert answers[0] != answers[1]


@pytest.mark.asyncio
async def test_prefill_and_decode_give_what_one_engine_gives_from_embeddings_of_another(
    subject: Subject,
) -> None:
    turns, sounds = CONVERSATIONS[4]
    prompt = await subject.prompt(turns, sounds)
    placed = [dataclasses.replace(p, item=as_it_arrives(p.item)) for p in prompt.media]
    asked = request(prompt.token_ids, media=placed, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    halves = await split(subject.engine, asked)
    assert halves.token_ids == subject.expected(prompt.token_ids, sounds)
    assert halves.usage == (len(prompt.token_ids), OUTPUT_TOKENS, 0)


@pytest.mark.asyncio
async def test_a_long_prompt_with_sounds_in_chunks_gives_what_it_gives_in_one(
    saved: tuple[Path, Any],
) -> None:
    directory, reference = saved
    engine = make_tiny_engine(directory, FAMILY, max_num_tokens=16)
    await engine.start()
    try:
        subject = Subject(engine, reference, directory)
        turns, sounds = CONVERSATIONS[3]
        prompt = await subject.prompt([turn("system", "Say what it is. " * 4), *turns], sounds)
        asked = request(prompt.token_ids, media=prompt.media, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        output = await generate(engine, asked)
        assert output.token_ids == subject.expected(prompt.token_ids, sounds)
    finally:
        await engine.close()


@pytest.mark.asyncio
async def test_a_sound_takes_the_tokens_that_were_foretold_and_is_the_same_in_any_batch(
    subject: Subject,
) -> None:
    lengths = (SHORTEST, 640, 641, 4000, 15999, 16001, LONGEST - 1, LONGEST)
    sounds = [sized(20 + at, samples) for at, samples in enumerate(lengths)]
    together = await asyncio.gather(*(subject.engine.encode([sound]) for sound in sounds))
    for sound, (encoded,) in zip(sounds, together, strict=True):
        (alone,) = await subject.engine.encode([sound])
        foretold = subject.engine.media_tokens(MediaShape("audio", (len(sound.samples),)), {})
        assert foretold == len(encoded.token_ids) == encoded.tensors["features"].shape[0]
        assert set(encoded.token_ids) == {AUDIO}
        assert (encoded.kind, encoded.digest) == ("audio", sound.digest)
        torch.testing.assert_close(
            encoded.tensors["features"], alone.tensors["features"], rtol=1e-4, atol=1e-5
        )


@pytest.mark.asyncio
async def test_what_the_model_cannot_hear_whole_is_refused_in_words(subject: Subject) -> None:
    shortest = "the sound is too short: this model hears sounds from 0.020 s on"
    longest = "the sound takes 2.5 s; this model hears at most 2 s"
    for samples, fault, words in ((SHORTEST - 1, ClientFault, shortest), (40000, LimitFault, longest)):
        with pytest.raises(fault) as caught:
            await subject.engine.encode([sized(40, samples)])
        assert caught.value.message == words
        assert subject.engine.media_tokens(MediaShape("audio", (samples,)), {}) is None


@pytest.mark.asyncio
async def test_the_engine_says_at_which_rate_and_how_long_it_hears_and_takes_no_other_kind(
    saved: tuple[Path, Any],
) -> None:
    engine = make_tiny_engine(saved[0], FAMILY)
    info = await engine.start()
    try:
        assert set(info.media) == {"audio"}
        taken = info.media["audio"]
        assert (taken.placeholder_id, taken.rule) == (AUDIO, AudioRule(rate=SOUND_RATE, max_duration_s=2.0))
        assert (taken.encodes, taken.takes_encoded, taken.takes_files, dict(taken.options)) == (
            True,
            True,
            False,
            {},
        )
        with pytest.raises(ClientFault, match="this model takes no precomputed embeddings of audio"):
            engine.adopt_embeddings("audio", "d", {"features": torch.zeros(4, 64)}, {})
        with pytest.raises(ClientFault, match="this model takes no image"):
            await engine.encode([DecodedImage("d", noise_image(1, 28, 28))])
    finally:
        await engine.close()


@pytest.mark.asyncio
async def test_embeddings_that_do_not_fit_the_prompt_are_refused_by_name(subject: Subject) -> None:
    (encoded,) = await subject.engine.encode([sized(41, 16000)])
    prompt = expand([20, AUDIO, 21], {"audio": AUDIO}, [encoded])
    torn = dataclasses.replace(encoded, tensors={n: t[:-1] for n, t in encoded.tensors.items()})
    placed = [dataclasses.replace(prompt.media[0], item=torn)]
    with pytest.raises(PartFault, match="audio 1: its embeddings are not the 25 x 64 that the prompt needs"):
        await generate(subject.engine, request(prompt.token_ids, media=placed, max_tokens=2))


@pytest.mark.asyncio
async def test_a_feature_extractor_of_another_model_is_refused_at_start(tmp_path: Path) -> None:
    directory = save_tiny_model(FAMILY, tmp_path)
    for file in directory.glob("*processor_config.json"):
        settings = json.loads(file.read_text())
        (settings.get("feature_extractor") or settings)["chunk_length"] = 30
        file.write_text(json.dumps(settings))
    engine = make_tiny_engine(directory, FAMILY)
    with pytest.raises(StartupError, match="its feature extractor makes other spectrograms"):
        await engine.start()
    await engine.close()


@pytest.mark.asyncio
async def test_a_family_without_audio_does_not_offer_it(tmp_path: Path) -> None:
    engine = make_tiny_engine(tmp_path, "llava")
    info = await engine.start()
    try:
        assert set(info.media) == {"image"}
        with pytest.raises(ClientFault, match="this model takes no audio"):
            await engine.encode([random_sound(1, 0.5)])
    finally:
        await engine.close()
