"""Development tools, not published: environments, matrix, pages, images, engine, proof, bench."""
