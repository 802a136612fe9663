"""System checks: rules between settings, each with an id."""
