"""Inspects a container image without running it: which vLLM would serve, and is it fixed?"""
