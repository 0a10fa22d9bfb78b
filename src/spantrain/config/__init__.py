"""Files <-> dataclasses: what a user or an earlier step wrote, read strictly; no torch.

problems      all that is wrong with one file, told in one message
files         read files of bounded size, write atomically, digest
parsing       text -> plain values or YAML nodes, within bounds
yaml_fields   the strict reader of one YAML node: quantities, names, tables
kinds         device kinds: kinds.yaml of the package, and the `kinds` section of a cluster file
device_rows   the devices of one host
link_rows     the links between sites
cluster_file  cluster.yaml -> Cluster
changes_file  speeds of devices and links over time
trace_library   networks that change, by name
network_traces  a trace of the library or of a file, for a cluster and a run
graphs        unit graphs that ship with the program, for planning without torch
presets       the papers' clusters and the demo's, by name
consistency   references inside a cluster, profile or plan that a type cannot check
json_codec    dataclass <-> plain JSON
artefacts     profile.json and plan.json
reference         a folder of measured runs of others, with profiles and links, read strictly
reference_fields  the strict reader of one JSON value
reference_types   what such a folder says
outer         outer.yaml: master, shards and numbers of the outer optimizer
outer_rows    where its master and shards are
outer_numbers   how often clusters exchange, how a step is made, how the master decides
outer_places  where shards could be
trace_file    trace.json -> what happened on each lane
decision_log  decisions.jsonl: what policies heard and answered
"""
