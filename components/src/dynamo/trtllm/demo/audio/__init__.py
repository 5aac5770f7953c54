"""The second demo model: a very small Qwen2-Audio that describes beeps and tones, and what it takes to train
and to check it.

`dynamo.trtllm.demo.AUDIO_MODEL_DIR` is its Hugging Face directory. Importing this module loads nothing else.
"""
