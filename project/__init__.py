"""The Sluicegate project: settings, entry points and what both apps stand on."""
