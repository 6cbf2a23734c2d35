"""Which tokens of which sequences run in the next step. Pure Python: no JAX, and the caller passes the time."""
