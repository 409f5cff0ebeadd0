"""Speed and size against the alternatives, as ratios measured side by side in one run."""
