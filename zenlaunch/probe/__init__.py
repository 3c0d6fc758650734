"""Reading: a filesystem root or a text becomes a Topology, a model folder becomes sizes."""
