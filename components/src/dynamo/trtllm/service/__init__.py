"""This process as a Dynamo worker: registration, presence in discovery, signals, its end."""
