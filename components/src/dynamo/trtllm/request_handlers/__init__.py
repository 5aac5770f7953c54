"""One handler for each role, composed of shared steps."""
