"""Runs a real vLLM engine on a CPU: harness, demonstration, traffic."""
