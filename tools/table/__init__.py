"""compat_matrix.yaml as tools read and write it."""
