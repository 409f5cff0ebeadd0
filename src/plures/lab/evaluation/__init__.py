"""Measure an ensemble: on its own data, under shift, on unfamiliar data; and predict picture files."""
