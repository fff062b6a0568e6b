"""Plans for examples with several lengths, such as source and target.

Only the distinct combinations of T that examples need matter, and how many examples
need each: these are the `points`. `pricing` says what a batch of any shape holds and
costs. Choosing K shapes is a facility location problem (each point goes to the cheapest
shape that holds it), so `search` solves it as usual: it starts with few shapes, adds
one at a time, and then swaps single shapes for others while an epoch becomes cheaper;
`swaps` counts what each of thousands of shapes would take, at once. It first minimizes
the cost of full batches, and then that of an epoch with remainders. `nested` gives it
more places to start. `planner` chooses B for the cheapest shapes found.
"""
