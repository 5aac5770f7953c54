"""Command line and configuration layers of the worker."""
