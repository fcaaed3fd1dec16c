"""Produces evidence that a patched release behaves as vLLM 0.30.0 does.

Test equipment, not part of the package: operation sequences that are compared between releases,
mutants, vLLM's own tests, patches of other projects, and the report about them. The sessions in
noxfile.py run it.
"""
