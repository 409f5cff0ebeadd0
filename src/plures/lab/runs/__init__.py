"""Run folders: their files, their configuration, and how they are opened."""
