"""Tests this package in container images, built locally or pulled."""
