"""How long things take: times measured in turn and the costs of runs."""
