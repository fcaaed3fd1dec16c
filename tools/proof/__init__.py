"""Evidence that a patched release behaves as vLLM 0.30.0 does.

Test equipment, not part of the package: operation sequences run on real releases in processes of
their own and compared, mutants, vLLM's own tests, a pool that poisons freed blocks, a soak, and the
report about all of it. Run by the sessions in noxfile.py.
"""
