"""Inspects a container image without running it: which vLLM it serves and whether that leaks."""
