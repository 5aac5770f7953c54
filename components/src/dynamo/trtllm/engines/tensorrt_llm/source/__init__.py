"""Reads TensorRT-LLM's own source, a checkout or an installed package, and imports nothing of it.

`tree` finds and parses files, `fields` reads classes, `models` the registered models, `facts` puts them
together in the groups of the record, `compare` says how they differ from it, and `rules` holds what the
adapter relies on, one named rule each.
"""
