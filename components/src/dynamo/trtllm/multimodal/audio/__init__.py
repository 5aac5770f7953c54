"""Sounds: from the bytes of a WAV, FLAC, MP3 or Ogg file to the samples that a model should hear.

Pure and blocking; it runs in a process that can be ended (`multimodal.clips`).
"""
