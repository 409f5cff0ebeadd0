"""Adapters between a stage and the trainers of other libraries."""
