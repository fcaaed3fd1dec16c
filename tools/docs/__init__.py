"""Generates pages and drawings of the documentation."""
