"""The time of an epoch on machines that are not there, from a histogram of lengths.

1. `schedule.batch_counts` computes the buckets and the numbers of examples of all
   steps, which need no examples.
2. `cluster.Cluster` says how long a step, loading, compiling, a checkpoint and a
   restart take, and how they are distributed over hosts and time.
3. `epoch` adds up the parts of an epoch. `faults` replays it with random faults, and
   finds the interval of checkpoints that loses least.
4. `simulation` holds the results and prints them, and `plots` draws them.
"""

from jaxbucket.base.lazy import lazy_names as _lazy_names

with _lazy_names(globals()):
    from jaxbucket.simulate.cluster import Cluster as Cluster
    from jaxbucket.simulate.epoch import simulate as simulate
    from jaxbucket.simulate.simulation import SimulatedEpoch as SimulatedEpoch
    from jaxbucket.simulate.simulation import Simulation as Simulation
