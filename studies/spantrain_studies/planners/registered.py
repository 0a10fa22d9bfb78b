"""The planners of other systems as strategies of `spantrain plan`, by the entry points of this package."""

from spantrain.planner.strategies.registry import RegisteredStrategy
from spantrain_studies.planners.alpa import alpa
from spantrain_studies.planners.asteroid.strategy import asteroid
from spantrain_studies.planners.asymmetric.hexiscale import hexiscale
from spantrain_studies.planners.asymmetric.zorse import zorse
from spantrain_studies.planners.dapple import dapple
from spantrain_studies.planners.eddl import eddl
from spantrain_studies.planners.exhaustive import exhaustive
from spantrain_studies.planners.hetpipe import hetpipe
from spantrain_studies.planners.metis import metis
from spantrain_studies.planners.pipedream import pipedream
from spantrain_studies.planners.sailor.strategy import sailor

EDDL = RegisteredStrategy(propose=eddl, description="the whole model on every device, shares by capacity")
PIPEDREAM = RegisteredStrategy(propose=pipedream, description="PipeDream's partition for alike devices, with a flush")
DAPPLE = RegisteredStrategy(propose=dapple, description="DAPPLE's partition over machines in cluster order")
ASTEROID = RegisteredStrategy(
    propose=asteroid, description="Asteroid's stages of devices sorted by memory, 1F1B with its warm-up"
)
HETPIPE = RegisteredStrategy(propose=hetpipe, description="HetPipe's equal virtual workers, with a flush")
ALPA = RegisteredStrategy(propose=alpa, description="Alpa's stages on alike submeshes of samples or tensors")
METIS = RegisteredStrategy(propose=metis, description="Metis's uneven device groups with balanced samples and layers")
HEXISCALE = RegisteredStrategy(
    propose=hexiscale, description="HexiScale's even pipelines of unlike devices and tensor groups, by links"
)
ZORSE = RegisteredStrategy(
    propose=zorse, description="Zorse's stages of devices that talk fast, of unlike kinds, with divided state"
)
SAILOR = RegisteredStrategy(
    propose=sailor, description="Sailor's choice of devices, tensor groups and equally wide stages"
)
EXHAUSTIVE = RegisteredStrategy(
    propose=exhaustive, description="the optimum of small cases, by trying everything", small_only=True
)
