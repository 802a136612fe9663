"""The mutation proof: each mechanism broken on purpose in a copy of the tree, and the tests that see it.

`python -m tests.mutations` (or `make mutations`) runs it all; words after it choose mutations by their names.
"""
