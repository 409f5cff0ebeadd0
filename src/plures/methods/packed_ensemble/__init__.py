"""Packed-Ensembles, with the layers that run narrow members side by side."""
