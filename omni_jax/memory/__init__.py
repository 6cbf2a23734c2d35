"""Host-side bookkeeping of device memory: KV cache blocks, their contents and holders, and encoder features."""
