"""Run folders: their files, what they were made from, and how they are opened."""
