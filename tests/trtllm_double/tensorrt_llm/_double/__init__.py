"""What stands behind the double's public face: the release it plays, its script and its arithmetic."""
