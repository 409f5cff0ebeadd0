"""Measure an ensemble: at home, under shift, among strangers; and predict picture files."""
