"""Speed of the engine, measured beside other programs in interleaved rounds. Not part of the package."""
