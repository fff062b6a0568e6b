"""Optax transformations and schedules that adapt the learning rate to the batch size.

The size of a batch is passed to `update` along with the gradients, as an extra
argument. There are two ways to scale the learning rate:

`scale_by_batch_size` multiplies the updates of the optimizer before it, which equals
scaling the learning rate if the update is linear in it.

`scale_schedule` scales the learning rate inside the optimizer, through
`optax.inject_hyperparams`. Use it for optimizers that are not linear: Adafactor with
momentum or weight decay and LARS, whose state depends on earlier learning rates;
Fromage, which uses its square; and Polyak's step and Rprop, which use it only as a
bound or an initial value.

`schedule_by_work` counts examples or tokens instead of steps.
"""

from jaxbucket.base.lazy import lazy_names as _lazy_names

with _lazy_names(globals()):
    from jaxbucket.optim.batch_size import scale_by_batch_size as scale_by_batch_size
    from jaxbucket.optim.schedules import scale_schedule as scale_schedule
    from jaxbucket.optim.schedules import schedule_by_work as schedule_by_work
    from jaxbucket.optim.schedules import (
        warmup_inverse_sqrt_schedule as warmup_inverse_sqrt_schedule,
    )
    from jaxbucket.optim.states import learning_rate_metrics as learning_rate_metrics
