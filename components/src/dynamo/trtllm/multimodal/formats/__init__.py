"""What image files hold, read here without a library: size, orientation, profile, and the bytes that the
pixels need.

One module per container. Metadata that no pixel needs is left behind before a library sees the file, so
nothing in it can refuse an image, be inflated without bound or cost time. Walking a file is bounded in
steps, and cheap enough for the event loop's side.
"""
