"""Learning rates that follow the batch, as optax transformations and schedules.

A batch says its own size: it comes with the gradients, as an extra argument of
`update`. So neither a skipped step nor a resume can part the two. There are two ways:

`scale_by_batch_size` multiplies what an optimizer before it returns. That is the same
as scaling its learning rate where the update is the learning rate times something that
has not seen it (`is_linear_in_lr`): SGD with and without momentum, Adam(W), Lion,
RMSProp, and most others of optax.

`scale_schedule` scales the learning rate inside the optimizer, through
`optax.inject_hyperparams`, and is right for all that have one. It is the way for those
that are not linear: Adafactor with momentum or weight decay, and LARS, which keep
what was multiplied by earlier learning rates; Fromage, which has its square; and
whatever takes it for a bound or a first guess only, as Polyak's step and Rprop do.

`schedule_by_work` counts examples or tokens instead of steps, and `scale_by_adam_sde`
changes Adam's averages with the batch.
"""

from etils import epy as _epy

with _epy.lazy_api_imports(globals()):
    from jaxbucket.optim.adam_sde import scale_by_adam_sde
    from jaxbucket.optim.batch_size import scale_by_batch_size
    from jaxbucket.optim.linearity import is_linear_in_lr
    from jaxbucket.optim.schedules import (
        scale_schedule,
        schedule_by_work,
        warmup_inverse_sqrt_schedule,
    )
