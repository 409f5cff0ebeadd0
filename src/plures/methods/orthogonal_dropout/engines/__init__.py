"""Engines: ways to predict with a trained split network that are faster or smaller than the ensemble itself."""
