"""Other engines' doors to the store: `forebay.connectors.vllm` is vLLM's. What isn't about one engine lies beside it.

    settings    what a user may say, checked
    keys        chunk keys of a request, from its tokens, salt, adapter and inputs
    adapters    fingerprints of LoRA adapters by content
    blocks      an engine's blocks and our chunks: which tokens are where
    orders      what the scheduler's process tells the ranks
    tracking    a request from its lookup to its end, in the scheduler's process
    link        a thread with a connection that comes back by itself
    copying     between an engine's caches and payloads in the pool (torch)
    moving      a rank's loads and stores
    cells       how an engine keeps K and V in a block
    grouping    from an engine's layers to our cache groups
    questions   a lookup that two threads share
    relay       the store's events, told again
    guard       nothing is raised into an engine
"""
