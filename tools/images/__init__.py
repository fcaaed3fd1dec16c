"""Container images, built locally or pulled, and this package in them."""
