"""What is wrong with an installation, and what to do: checks that look, change nothing, and depend on nothing but
what they look at. `streaming.doctor` puts them together (docs/architecture.md, Commands).
"""
