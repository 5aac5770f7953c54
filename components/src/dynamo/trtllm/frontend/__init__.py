"""From the frontend's request to a frozen one, and from an engine's steps to the frontend's chunks:
Dynamo's formats."""
