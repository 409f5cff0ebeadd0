"""Speed and size against the alternatives: what `plures bench` measures."""
