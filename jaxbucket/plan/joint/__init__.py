"""The shapes for examples with several lengths, planned in all of them at once.

`points` counts the examples by their lengths, `pricing` evaluates the user's functions
and `additions` the cost of every possible further shape. `steady` chooses shapes as if
every batch were full, `epoch` improves them with remainders, `bound` computes how much
better any shapes could be, and `enumeration` compares all of them if there are few.
`planner` combines these modules.
"""
