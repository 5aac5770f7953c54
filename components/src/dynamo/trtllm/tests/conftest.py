"""Empty on purpose: `ai-dynamo` declares a pytest plugin of this name,
and without the file plain `pytest` would not start."""
