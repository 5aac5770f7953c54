"""Clips: from the bytes of an MP4, MOV or WebM file to the frames that a model should see.

`rules` says which frames, `container` what the file is, `timeline` when its frames are shown, `frames`
decodes the chosen ones; `reading` puts them together. All of it is pure and blocking, and runs in a process
that can be ended (`multimodal.clips`).
"""
