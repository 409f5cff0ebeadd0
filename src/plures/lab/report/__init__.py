"""One page that shows the rows of a comparison: `plures report`."""
