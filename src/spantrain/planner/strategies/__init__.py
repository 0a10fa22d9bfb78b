"""Ways to decide what runs where: a file each, with its source and what of it is kept.

registry       strategies by name
spantrain_dp   SpanTrain's dynamic programme
single_device  the best device alone
single_site    the best site alone
ddp            data parallelism with equal shares
eddl           data parallelism with shares by capacity
equal_layers   pipelines of equal layers: gpipe, 1f1b
pipedream      PipeDream's partition, run with a flush
dapple         DAPPLE's partition and placement
hetpipe        HetPipe's equal virtual workers, run with a flush
alpa           Alpa's inter-operator programme on alike submeshes
auto           ours: everything chosen together, guided by bounds and the simulator
auto_blocks    blocks of devices that its search moves together
auto_bound     seconds that no order of work can beat, for many plans at once
auto_cuts      places and bounds the cuts of many pipelines at once
auto_hops      seconds of the ways between parts for every cut
auto_moves     small changes of a pipeline
auto_orders    starts of the search
auto_parts     seconds and bytes of parts of a pipeline for every span of units
auto_reasons   why its plan is as it is
auto_score     what is best, limits counted
auto_search    the search itself
auto_shape     a plan in the making
auto_weights   what an objective counts, as weights
exhaustive     the true optimum of small cases, for tests
exhaustive_space  all plans of a small case, as arrays
"""
