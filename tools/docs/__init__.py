"""Pages and drawings that are generated."""
