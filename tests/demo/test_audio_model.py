"""The shipped audio model: its files, its held-out accuracy, and that training batches are what the processor
makes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import jinja2
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoProcessor, Qwen2AudioProcessor

from dynamo.trtllm.demo import AUDIO_MODEL_DIR, train
from dynamo.trtllm.demo.audio import dialogues, evaluation
from dynamo.trtllm.demo.audio.artifacts import CHAT_TEMPLATE, MAX_WEIGHTS_BYTES, SPECIAL_TOKENS
from dynamo.trtllm.demo.audio.batches import IGNORED, Collator, Encoder, losses, render
from dynamo.trtllm.demo.audio.dialogues import Dialogue, Mix, draw_dialogue, to_messages
from dynamo.trtllm.demo.audio.sounds import MODEL_RATE, Sound, draw_sound, heard
from dynamo.trtllm.demo.evaluation import Score
from dynamo.trtllm.demo.phrasing import Turn

SOUND = "<|audio_bos|><|AUDIO|><|audio_eos|>\n"


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return evaluation.load(AUDIO_MODEL_DIR)


@pytest.fixture(scope="module")
def scores(loaded: tuple[Any, Any]) -> dict[str, Score]:
    return evaluation.evaluate(*loaded, n=24)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(AUDIO_MODEL_DIR / "tokenizer.json"))


@pytest.fixture(scope="module")
def dialogue_sample() -> list[Dialogue]:
    rng = Random(5)
    mix = Mix(text_only=0.1, several_sounds=0.4, several_turns=0.3)
    return [draw_dialogue(rng, lambda: draw_sound(rng.randrange(1000)), mix) for _ in range(16)]


def test_the_directory_is_complete_and_small() -> None:
    assert 0 < (AUDIO_MODEL_DIR / "model.safetensors").stat().st_size <= MAX_WEIGHTS_BYTES == 3_000_000
    assert sum(path.stat().st_size for path in AUDIO_MODEL_DIR.iterdir()) < 3_000_000
    assert {path.name for path in AUDIO_MODEL_DIR.iterdir()} == {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "preprocessor_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_transformers_takes_it_for_a_qwen2_audio_and_its_processor() -> None:
    config = AutoConfig.from_pretrained(AUDIO_MODEL_DIR)
    assert (config.model_type, config.architectures) == (
        "qwen2_audio",
        ["Qwen2AudioForConditionalGeneration"],
    )
    anything: Any = AutoProcessor
    processor = anything.from_pretrained(AUDIO_MODEL_DIR)
    assert type(processor) is Qwen2AudioProcessor
    extractor = processor.feature_extractor
    assert extractor.n_samples == 2 * config.audio_config.max_source_positions * extractor.hop_length == 64000
    assert (extractor.feature_size, extractor.sampling_rate) == (config.audio_config.num_mel_bins, MODEL_RATE)


def test_tensors_have_the_names_of_the_published_checkpoints() -> None:
    with safe_open(str(AUDIO_MODEL_DIR / "model.safetensors"), "pt") as file:
        names = set(file.keys())
    assert {name.split(".")[0] for name in names} == {
        "audio_tower",
        "language_model",
        "multi_modal_projector",
    }
    assert {"language_model.model.norm.weight", "language_model.lm_head.weight"} <= names


def test_special_tokens_are_single_ids_and_any_text_survives(tokenizer: Tokenizer) -> None:
    assert [len(tokenizer.encode(token).ids) for token in SPECIAL_TOKENS] == [1] * len(SPECIAL_TOKENS)
    for text in ("Describe the sound.", "héllo wörld — naïve", "图片 🙂", "\x00\t\r\n\n  end  "):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_both_copies_of_the_chat_template_are_the_one_in_the_source() -> None:
    settings = json.loads((AUDIO_MODEL_DIR / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert settings["chat_template"] == CHAT_TEMPLATE
    assert (AUDIO_MODEL_DIR / "chat_template.jinja").read_text(encoding="utf-8") == CHAT_TEMPLATE


@pytest.mark.parametrize("kind", ["audio", "audio_url", "input_audio"])
def test_the_template_numbers_the_sounds_of_a_conversation_in_their_order(kind: str) -> None:
    sound = {"type": kind, kind: {"url": "x"}}
    messages = [
        {"role": "user", "content": ["first ", sound, {"type": "text", "text": "second "}, sound]},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": [sound, {"type": "text", "text": "and this?"}]},
    ]
    template = jinja2.Environment().from_string(CHAT_TEMPLATE)
    assert template.render(messages=messages, add_generation_prompt=True) == (
        f"<|im_start|>user\nfirst Audio 1: {SOUND}second Audio 2: {SOUND}<|im_end|>\n"
        "<|im_start|>assistant\na<|im_end|>\n"
        f"<|im_start|>user\nAudio 3: {SOUND}and this?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "kind", ["sounds", "counted", "slides", "pitches", "several", "follow_up", "wav", "flac", "mp3", "ogg"]
)
def test_held_out_sounds_are_described_and_asked_about_also_from_files(
    scores: dict[str, Score], kind: str
) -> None:
    assert scores[kind].total == 24
    assert scores[kind].right >= 23, scores[kind].mistakes


def test_without_a_sound_it_greets_or_says_that_it_hears_none(
    loaded: tuple[Any, Any], scores: dict[str, Score]
) -> None:
    assert scores["greetings"].answers == [dialogues.GREETING] * 5
    asked: list[Dialogue] = [
        [Turn("user", (text,))] for text in ("Describe the sound.", "How many beeps?", "Who are you?")
    ]
    assert evaluation.answer(*loaded, asked) == [dialogues.NO_SOUND, dialogues.NO_SOUND, dialogues.IDENTITY]


@pytest.mark.parametrize(
    "text", ["", "DESCRIBE THE SOUND!!", "  what do you hear   ", "Look: what can you hear in this?"]
)
def test_other_wordings_get_the_caption(loaded: tuple[Any, Any], text: str) -> None:
    sound = draw_sound(31)
    contents = [(sound, text), (text, sound)] if text else [(sound,)]
    asked: list[Dialogue] = [[Turn("user", content)] for content in contents]
    assert evaluation.answer(*loaded, asked) == [sound.caption] * len(asked)


def test_training_ids_and_spectra_are_the_processors(
    loaded: tuple[Any, Any], tokenizer: Tokenizer, dialogue_sample: list[Dialogue]
) -> None:
    processor, compared = loaded[1], 0
    for dialogue in dialogue_sample:
        example = Encoder(tokenizer).encode(dialogue)
        sounds = [heard(item) for turn in dialogue for item in turn.content if isinstance(item, Sound)]
        text = processor.apply_chat_template(to_messages(dialogue), tokenize=False)
        assert text == render(dialogue)
        rate = {"sampling_rate": MODEL_RATE} if sounds else {}
        inputs = processor(text=[text], audio=sounds or None, return_tensors="pt", **rate)
        assert inputs["input_ids"][0].tolist() == example.ids.tolist()
        if sounds:
            batch = Collator(tokenizer).collate([example])
            assert torch.equal(batch.spectra, inputs["input_features"])
            assert torch.equal(batch.spectra_mask, inputs["feature_attention_mask"])
            compared += len(sounds)
    assert compared > 12


def test_only_answers_and_the_ends_of_their_turns_are_trained(tokenizer: Tokenizer) -> None:
    sound = draw_sound(1)
    turns: Dialogue = [
        Turn("user", (sound, "What?")),
        Turn("assistant", ("one beep.",)),
        Turn("user", ("Thanks",)),
    ]
    example = Encoder(tokenizer).encode([*turns, Turn("assistant", (dialogues.THANKS,))])
    trained = [label for label in example.labels.tolist() if label != IGNORED]
    text = tokenizer.decode(trained, skip_special_tokens=False)
    assert text == f"one beep.<|im_end|>{dialogues.THANKS}<|im_end|>"


def test_the_trained_model_has_nearly_no_loss_left_over_padded_batches(
    loaded: tuple[Any, Any], tokenizer: Tokenizer, dialogue_sample: list[Dialogue]
) -> None:
    batch = Collator(tokenizer).collate([Encoder(tokenizer).encode(dialogue) for dialogue in dialogue_sample])
    with torch.inference_mode():
        found = losses(loaded[0], batch)
    assert float(found.loss) < 0.05
    assert float(found.accuracy) > 0.98


def test_training_by_path_makes_a_directory_that_loads(tmp_path: Path) -> None:
    out = tmp_path / "model"
    out.mkdir()
    (out / "tokenizer.json").write_bytes((AUDIO_MODEL_DIR / "tokenizer.json").read_bytes())
    command = [sys.executable, str(Path(train.__file__)), "--audio", "--out", str(out), "--device", "cpu"]
    command += ["--workers", "0", "--steps", "2", "--rows", "2", "--cases", "0"]
    subprocess.run(command, check=True, timeout=240)
    for path in AUDIO_MODEL_DIR.iterdir():
        if path.name not in ("README.md", "model.safetensors"):
            assert (out / path.name).read_bytes() == path.read_bytes()
    assert (out / "model.safetensors").stat().st_size == (
        AUDIO_MODEL_DIR / "model.safetensors"
    ).stat().st_size
    evaluation.load(out)
