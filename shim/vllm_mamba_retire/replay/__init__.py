"""Replays of a workload through the installed vLLM, without a GPU or weights."""
