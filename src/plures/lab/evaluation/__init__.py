"""Measure an ensemble on its own data, under shift and out of distribution; and predict image files."""
