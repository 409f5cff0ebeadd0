"""How long things take: ratios, costs of methods, estimates of recipes."""
