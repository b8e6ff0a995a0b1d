"""The bundle folder: its manifest, how it is written and how it is opened."""
