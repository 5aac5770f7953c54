"""Inference engines behind one port. Nothing is imported before an engine is chosen."""
