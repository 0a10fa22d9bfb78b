"""Ways to decide what runs where: a file each, with its source and what of it is kept.

registry       strategies by name
spantrain      SpanTrain's beam search and second level, of the English paper
spantrain_beam  its algorithm 1
spantrain_build  what it finds, as plans
spantrain_hops  ways between stages with the ports that they share, rings of sums
spantrain_tables  its cost model as arrays
spantrain_ways  asymmetric parallelism inside a group
spantrain_dp   SpanTrain's dynamic programme, of the Chinese paper
single_device  the best device alone
single_site    the best site alone
ddp            data parallelism with equal shares
zero2          data parallelism with divided gradients and optimizer state
fsdp           data parallelism with all state divided
eddl           data parallelism with shares by capacity
equal_layers   pipelines of equal layers: gpipe, 1f1b
pipedream      PipeDream's partition, run with a flush
dapple         DAPPLE's partition and placement
asteroid       Asteroid's pipelines of unlike devices, sorted by memory
asteroid_search  its algorithm 2
asteroid_shares  its algorithm 1
asteroid_tables  its steps as arrays
hetpipe        HetPipe's equal virtual workers, run with a flush
alpa           Alpa's inter-operator programme on alike submeshes
sailor         Sailor's choice of devices, tensor groups and equally wide stages
sailor_space   devices that stand for each other, and what stages take on them
sailor_task    a shape of its search as tasks for its programme
sailor_programme  its dynamic programme over stages and what is left
sailor_place   devices by name, and the step by its model
metis          Metis's uneven device groups with balanced samples and layers
metis_costs    seconds and bytes of device groups for all ranges of units
metis_groups   orders of kinds, and groups of even capacity
auto           ours: everything chosen together, guided by bounds and the simulator
auto_blocks    blocks of devices that its search moves together
auto_bound     seconds that no order of work can beat, for many plans at once
auto_cuts      places and bounds the cuts of many pipelines at once
auto_hops      seconds of the ways between parts for every cut
auto_moves     small changes of a pipeline
auto_orders    starts of the search
auto_parts     seconds and bytes of parts of a pipeline for every span of units
auto_pools     its search over counts of alike devices: many of them, or Megatron-like frameworks
auto_reasons   why its plan is as it is
auto_score     what is best, limits counted
auto_search    the search itself
auto_shape     a plan in the making
auto_shards    what it costs to divide the state of a stage, for every span of units
auto_state     its plans whose stages divide state, where that is allowed
auto_tensor    its plans whose replicas divide tensors, where that is allowed
auto_weights   what an objective counts, as weights
auto_wires     its cuts between sites sent in fewer bytes, where that is allowed
exhaustive     the true optimum of small cases, for tests
exhaustive_space  all plans of a small case, as arrays
"""
