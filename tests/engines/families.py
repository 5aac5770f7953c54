"""Tiny random models of every family that the portable engine serves,
saved as directories like a real checkpoint.

Weights are drawn wide enough (0.15) for a greedy answer to wander over the vocabulary.
Nothing is downloaded: tokenizers and image processors are built in code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf
from PIL import Image
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from dynamo.trtllm.config import EngineConfig, EngineKind, Modality
from dynamo.trtllm.core import DecodedAudio, DecodedVideo
from dynamo.trtllm.engines.transformers.engine import TransformersEngine

VOCABULARY = 200
IMAGE, VIDEO, BEGIN, END, BREAK, GAP = 7, 8, 9, 10, 11, 12
_SPECIAL = {
    0: "<pad>",
    1: "<s>",
    2: "</s>",
    3: "<unk>",
    IMAGE: "<|image_pad|>",
    VIDEO: "<|video_pad|>",
    BEGIN: "<|vision_start|>",
    END: "<|vision_end|>",
    BREAK: "<|break|>",
}
AUDIO = 3
_AUDIO_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|AUDIO|>",
    "<|audio_bos|>",
    "<|audio_eos|>",
)
SOUND_RATE, LONGEST_SOUND_S, SOUND_ROWS = 16000, 2, 50
_TIME_WORDS = ("<", ">", ".", "seconds", *"0123456789")
_PATCH = 14


def tokenizer(**names: str) -> Any:
    """Words `w13` ... for ids from 13 on, the last ones those of a video's times;
    `names` are more special tokens."""
    words = {
        _SPECIAL.get(i, "\n\n" if i == GAP else f"w{i}"): i for i in range(VOCABULARY - len(_TIME_WORDS))
    }
    words |= {word: len(words) + i for i, word in enumerate(_TIME_WORDS)}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    apart = pre_tokenizers.Split(Regex(r"w\d+|\d|[<>.]|[a-z]+"), "isolated")
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), apart])
    for token in _SPECIAL.values():
        core.add_special_tokens([token])
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        extra_special_tokens=names,
    )


def text_config(**changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }


_CLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": _PATCH,
}


def _qwen(name: str, **vision: Any) -> tuple[Any, Any]:
    text = text_config(
        rope_parameters={"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    )
    tower = {
        "depth": 2,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 48,
        "patch_size": _PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
        **vision,
    }
    ids = {
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": BEGIN,
        "vision_end_token_id": END,
    }
    config = getattr(tf, f"{name}Config")(text_config=text, vision_config=tower, **ids)
    size = {"shortest_edge": 56 * 56, "longest_edge": 224 * 224}
    images = tf.Qwen2VLImageProcessor(patch_size=_PATCH, merge_size=2, temporal_patch_size=2, size=size)
    frames = {"shortest_edge": 56 * 56, "longest_edge": 112 * 112 * (8 if name == "Qwen3VL" else 1)}
    of_videos = tf.Qwen3VLVideoProcessor if name == "Qwen3VL" else tf.Qwen2VLVideoProcessor
    videos = of_videos(patch_size=_PATCH, size=frames, cap_pixels_per_frame=False)
    words = tokenizer(image_token="<|image_pad|>", video_token="<|video_pad|>")
    processor = {
        "Qwen2VL": tf.Qwen2VLProcessor,
        "Qwen2_5_VL": tf.Qwen2_5_VLProcessor,
        "Qwen3VL": tf.Qwen3VLProcessor,
    }[name]
    model = getattr(tf, f"{name}ForConditionalGeneration")(config)
    return model, processor(image_processor=images, tokenizer=words, video_processor=videos)


def qwen2_vl() -> tuple[Any, Any]:
    return _qwen("Qwen2VL", embed_dim=32, hidden_size=64)


def qwen2_5_vl() -> tuple[Any, Any]:
    return _qwen("Qwen2_5_VL", fullatt_block_indexes=[1], window_size=56)


def qwen3_vl() -> tuple[Any, Any]:
    return _qwen("Qwen3VL", deepstack_visual_indexes=[0, 1])


def llava() -> tuple[Any, Any]:
    config = tf.LlavaConfig(
        text_config=tf.LlamaConfig(**text_config()),
        vision_config=tf.CLIPVisionConfig(**_CLIP, projection_dim=32),
        image_token_id=IMAGE,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )
    images = tf.CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    words = tokenizer(image_token="<|image_pad|>")
    processor = tf.LlavaProcessor(
        image_processor=images,
        tokenizer=words,
        patch_size=_PATCH,
        vision_feature_select_strategy="default",
        image_token="<|image_pad|>",
        num_additional_image_tokens=1,
    )
    return tf.LlavaForConditionalGeneration(config), processor


def llava_next() -> tuple[Any, Any]:
    pinpoints = [[28, 56], [56, 28], [56, 56]]
    config = tf.LlavaNextConfig(
        text_config=tf.MistralConfig(**text_config(sliding_window=8)),
        vision_config=tf.CLIPVisionConfig(**_CLIP, projection_dim=32),
        image_token_id=IMAGE,
        vision_feature_layer=-1,
        image_grid_pinpoints=pinpoints,
    )
    images = tf.LlavaNextImageProcessor(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, image_grid_pinpoints=pinpoints
    )
    processor = tf.LlavaNextProcessor(
        image_processor=images,
        tokenizer=tokenizer(image_token="<|image_pad|>"),
        patch_size=_PATCH,
        vision_feature_select_strategy="default",
        image_token="<|image_pad|>",
        num_additional_image_tokens=1,
    )
    return tf.LlavaNextForConditionalGeneration(config), processor


def mistral3() -> tuple[Any, Any]:
    vision = tf.PixtralVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=112,
        patch_size=_PATCH,
    )
    config = tf.Mistral3Config(
        text_config=tf.MistralConfig(**text_config()), vision_config=vision, image_token_id=IMAGE
    )
    images = tf.PixtralImageProcessor(
        size={"longest_edge": 112}, patch_size={"height": _PATCH, "width": _PATCH}
    )
    processor = tf.PixtralProcessor(
        image_processor=images,
        tokenizer=tokenizer(),
        patch_size=_PATCH,
        spatial_merge_size=2,
        image_token="<|image_pad|>",
        image_break_token="<|break|>",
        image_end_token="<|vision_end|>",
    )
    return tf.Mistral3ForConditionalGeneration(config), processor


def gemma3() -> tuple[Any, Any]:
    layers = ["sliding_attention", "full_attention"] * 2
    text = tf.Gemma3TextConfig(**text_config(sliding_window=8, layer_types=layers, query_pre_attn_scalar=16))
    config = tf.Gemma3Config(
        text_config=text,
        vision_config=tf.SiglipVisionConfig(**_CLIP, vision_use_head=False),
        mm_tokens_per_image=4,
        image_token_id=IMAGE,
        image_token_index=IMAGE,
        boi_token_index=BEGIN,
        eoi_token_index=END,
    )
    images = tf.Gemma3ImageProcessor(size={"height": 28, "width": 28})
    words = tokenizer(image_token="<|image_pad|>", boi_token="<|vision_start|>", eoi_token="<|vision_end|>")
    return tf.Gemma3ForConditionalGeneration(config), tf.Gemma3Processor(images, words, image_seq_length=4)


def byte_tokenizer() -> Any:
    """Special tokens as Qwen2-Audio has them, and one for each byte: what any text becomes."""
    words = [*_AUDIO_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(models.BPE({word: at for at, word in enumerate(words)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(_AUDIO_SPECIAL))
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<|endoftext|>", eos_token="<|im_end|>"
    )


def qwen2_audio() -> tuple[Any, Any]:
    positions = 50 * LONGEST_SOUND_S
    tower = {
        "num_mel_bins": 16,
        "d_model": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 48,
    }
    audio = {"model_type": "qwen2_audio_encoder", **tower, "max_source_positions": positions}
    text = tf.Qwen2Config(**text_config(vocab_size=264))
    config = tf.Qwen2AudioConfig(audio_config=audio, text_config=text, audio_token_index=AUDIO)
    sounds = tf.WhisperFeatureExtractor(
        feature_size=16, sampling_rate=SOUND_RATE, chunk_length=LONGEST_SOUND_S
    )
    return tf.Qwen2AudioForConditionalGeneration(config), tf.Qwen2AudioProcessor(sounds, byte_tokenizer())


def text_llama() -> tuple[Any, Any]:
    return tf.LlamaForCausalLM(tf.LlamaConfig(**text_config())), tokenizer()


def text_gemma2() -> tuple[Any, Any]:
    layers = ["sliding_attention", "full_attention"] * 2
    config = tf.Gemma2Config(**text_config(sliding_window=8, query_pre_attn_scalar=16, layer_types=layers))
    return tf.Gemma2ForCausalLM(config), tokenizer()


def text_gpt2() -> tuple[Any, Any]:
    config = tf.GPT2Config(
        vocab_size=VOCABULARY, n_embd=64, n_layer=3, n_head=4, n_positions=512, bos_token_id=1, eos_token_id=2
    )
    return tf.GPT2LMHeadModel(config), tokenizer()


WITH_IMAGES: Mapping[str, Callable[[], tuple[Any, Any]]] = {
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "llava": llava,
    "llava_next": llava_next,
    "mistral3": mistral3,
    "gemma3": gemma3,
}
MULTIMODAL: Mapping[str, Callable[[], tuple[Any, Any]]] = {**WITH_IMAGES, "qwen2_audio": qwen2_audio}
TEXT: Mapping[str, Callable[[], tuple[Any, Any]]] = {
    "llama": text_llama,
    "gemma2": text_gemma2,
    "gpt2": text_gpt2,
}


def save_tiny_model(family: str, directory: Path) -> Path:
    """Write the tiny model of `family`, with processor or tokenizer, into `directory`;
    the same weights every time."""
    torch.manual_seed(0)
    model, processor = (MULTIMODAL.get(family) or TEXT[family])()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = 2
    model.eval().save_pretrained(directory)
    processor.save_pretrained(directory)
    return directory


def make_tiny_engine(directory: Path, family: str = "qwen2_vl", **args: Any) -> TransformersEngine:
    """A portable engine, not started, over the tiny model of `family`,
    which is saved into `directory` if it is not there.

    `args` are engine arguments under TensorRT-LLM's names.
    """
    if not (directory / "config.json").exists():
        save_tiny_model(family, directory)
    modality = Modality.MULTIMODAL if family in MULTIMODAL else Modality.TEXT
    config = EngineConfig(
        kind=EngineKind.TRANSFORMERS,
        model_path=str(directory),
        modality=modality,
        device="cpu",
        torch_threads=1,
        args=args,
    )
    return TransformersEngine(config)


def saved_processor(directory: Path) -> Any:
    """The processor beside the weights, as Transformers itself loads it."""
    return tf.AutoProcessor.from_pretrained(directory, local_files_only=True)


def reference_model(directory: Path, family: str) -> Any:
    """The same weights in Transformers itself: eager attention, float32,
    no end of sequence unless a test sets one."""
    loader = tf.AutoModelForMultimodalLM if family in MULTIMODAL else tf.AutoModelForCausalLM
    model = loader.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


def reference_tokens(
    model: Any,
    processor: Any,
    family: str,
    ids: Sequence[int],
    images: Sequence[Image.Image],
    count: int,
    videos: Sequence[DecodedVideo] = (),
    sounds: Sequence[DecodedAudio] = (),
) -> list[int]:
    """What `generate` gives greedily after the expanded prompt `ids`,
    from the pixels of `images` and `videos`, or from the samples of `sounds`.
    """
    inputs = torch.tensor([list(ids)])
    pixels: dict[str, Any] = {}
    if images:
        options = {"patch_size": 2 * _PATCH} if family == "mistral3" else {}
        pixels = dict(processor.image_processor(images=[list(images)], return_tensors="pt", **options))
        pixels.pop("num_crops", None)
        kinds = {"gemma3": "token_type_ids"}.get(
            family, "mm_token_type_ids" if family.startswith("qwen") else None
        )
        if kinds is not None:
            pixels[kinds] = (inputs == IMAGE).long()
    if videos:
        taken = processor.video_processor(
            videos=[video.frames for video in videos], do_sample_frames=False, return_tensors="pt"
        )
        pixels |= {name: taken[name] for name in ("pixel_values_videos", "video_grid_thw")}
        pixels["mm_token_type_ids"] = (inputs == IMAGE).long() + 2 * (inputs == VIDEO).long()
        if family == "qwen2_5_vl":
            shown = [len(video.frame_indices) / video.total_frames * video.fps for video in videos]
            pixels["second_per_grid_ts"] = [2 / fps for fps in shown]
    if sounds:
        heard = processor.feature_extractor(
            [sound.samples for sound in sounds],
            sampling_rate=SOUND_RATE,
            padding="max_length",
            return_attention_mask=True,
            return_tensors="pt",
        )
        pixels |= {
            "input_features": heard["input_features"],
            "feature_attention_mask": heard["attention_mask"],
        }
    mask = torch.ones_like(inputs)
    with torch.inference_mode():
        output = model.generate(
            input_ids=inputs, attention_mask=mask, max_new_tokens=count, do_sample=False, **pixels
        )
    tokens: list[int] = output[0, len(ids) :].tolist()
    return tokens


def noise_image(seed: int, width: int, height: int) -> Image.Image:
    """An image of random pixels, the same for the same arguments."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def noise_video(
    seed: int, frames: int, width: int, height: int, *, fps: float = 24.0, every: int = 12
) -> DecodedVideo:
    """Frames of random pixels, each `every` frames of a clip, the same for the same arguments."""
    pixels = np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)
    indices, total = tuple(range(0, frames * every, every)), frames * every
    return DecodedVideo(f"video {seed}", pixels, indices, fps, total, total / fps)


def random_sound(seed: int, seconds: float) -> DecodedAudio:
    """A tone of another pitch and level every 50 ms, the same for the same arguments."""
    random, count = np.random.default_rng(seed), int(seconds * SOUND_RATE)
    at = np.arange(count)
    piece = at // (SOUND_RATE // 20)
    hertz, level = random.uniform(100, 7000, (1000,)), random.uniform(0.01, 0.9, (1000,))
    samples = level[piece] * np.sin(2 * np.pi * hertz[piece] * at / SOUND_RATE)
    return DecodedAudio(f"sound {seed}", samples.astype(np.float32), SOUND_RATE)
