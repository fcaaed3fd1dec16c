"""The fix on disk: a patch series per release, put on a vLLM tree and taken off again.

For people who build images and want no run-time patching. One way through the rooms:
`tree` (what is there, by hash; reads `series` and `statefile`) -> `operations` (what would have to
change) -> `transaction` (all files or none, under `lock`) -> `childprobe` (does it behave).
"""
