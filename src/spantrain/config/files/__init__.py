"""The one reader of JSON and the one of YAML, with bounds on all that they take, and files that are never half written.

Not here: what any one file means.
To add a type: `json_codec` follows type hints, so most need nothing.
"""
