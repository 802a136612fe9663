"""Read-only checks of an installation; each finding comes with advice. `streaming.doctor` runs them together
(docs/architecture.md, Commands).
"""
