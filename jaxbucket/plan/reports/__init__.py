"""What a plan costs in an epoch: numbers, comparisons of plans, and pictures."""
