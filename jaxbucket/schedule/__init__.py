"""From a step to the examples of its batch, as pure functions of the step.

`BatchSchedule` deals the rows of an epoch (`epoch_rows`) in an order (`orders`,
`curriculum`); `Mixture` takes steps from several schedules. Nothing advances, so that a
run resumes from one integer.
"""
