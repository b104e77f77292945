"""KV events: what is held where, told to routers as it becomes true, over ZMQ, in vLLM's wire format."""
