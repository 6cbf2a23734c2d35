"""The lab: experiments that replay the same requests under each arm, on the real engine or in simulation."""
