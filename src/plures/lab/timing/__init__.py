"""How long things take: times measured in turn, the costs of runs, estimates of recipes."""
