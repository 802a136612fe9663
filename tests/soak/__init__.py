"""The soak: real workers without beat, seeded mischief in rounds, and the invariants after each (docs/soak.md)."""
