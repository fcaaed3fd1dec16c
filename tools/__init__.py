"""What only this project uses: environments, the matrix, pages, images, engine, proof, bench."""
