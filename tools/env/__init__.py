"""Environments and downloads that the sessions run on, made once and kept in a cache."""
