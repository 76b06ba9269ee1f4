"""How agents get onto nodes: a file per way."""
