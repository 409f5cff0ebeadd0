"""Fewer examples of properties whose examples take long: a third of what the profile asks for."""

from hypothesis import settings

few = settings(max_examples=settings.default.max_examples // 3)
