"""Use cases: inputs in, a result dataclass out; the command line and tests call them in the same way.

session     a coordinator with workers: here, on an emulated network, or on machines that join
profile     measure compute and network: cluster and model in, profile out
plan        search and compare: profile and job in, plan out
predict     what a plan should do: the event simulator with a profile's costs
schedule    what a schedule does, on even stages or on a plan; is an order in a file one that can run?
simulate    time, memory, money and energy of a plan under each schedule
requests    files into a training request: a plan, or an earlier run's checkpoint
train       train a plan: losses, figures of devices and links, trace out
emulation   whether emulated devices had the time that emulation needs
demo        all of it in one go, on the demonstration's cluster
worker      serve one device of this machine to a coordinator
reporter    what a use case tells the person who waits
tensorboard a run's scalars as TensorBoard events
cache       where results that are worth keeping between runs lie
"""
