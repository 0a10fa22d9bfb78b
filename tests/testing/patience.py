"""How long tests wait for what must come."""

PATIENCE_S = 120.0
"""A guard against hanging, never a measure: nothing that is waited for takes a tenth of it, on any machine."""
