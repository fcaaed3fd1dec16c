"""Reads and writes compat_matrix.yaml for tools and sessions."""
