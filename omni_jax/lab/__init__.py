"""The laboratory: arms x mixes x arrival rates x seeds, replayed identically, on the real engine or in simulation."""
