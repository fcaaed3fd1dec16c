"""Looks into a container image without running it: which vLLM would serve, and is it fixed?

The files that matter are read out of a layer archive, an exported container or an unpacked root
file system into memory. Nothing from an image is executed.
"""
