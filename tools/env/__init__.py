"""Makes the environments and downloads of the sessions, once, and keeps them in a cache."""
