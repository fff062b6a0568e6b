"""Reports on the cost of plans: numbers of an epoch, comparisons and plots."""
