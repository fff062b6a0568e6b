"""The shapes for examples with several lengths, planned in all of them at once.

`points` counts the examples by their lengths, `pricing` evaluates the user's functions,
and `additions` the cost with every possible further shape. `search` chooses shapes: at
first as if every batch were full (`steady`), then with remainders (`epoch`). `all_sets`
compares all sets of shapes if there are few. `planner` combines these modules.
"""
