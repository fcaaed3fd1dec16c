"""An image that an engine has: a container is made, read and removed, and never started."""

from __future__ import annotations

from .config import Config
from .engine import Engine
from .layers import put_layer
from .tree import Tree


def read_image(image: str, engine: str | None = None) -> tuple[Config, Tree]:
    """What matters of an image.

    Args:
        image: name, digest or id.
        engine: command of the engine; by default the one that answers.

    Raises:
        ImageError: no engine, no such image, or it cannot be read.
    """
    asked = Engine.find(engine)
    config = asked.config(image)
    tree = Tree()
    with asked.container(image) as container:
        put_layer(tree, lambda: asked.exported(container), image)
    return config, tree
