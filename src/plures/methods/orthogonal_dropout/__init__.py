"""Orthogonal dropout, and everything that only this method needs."""
