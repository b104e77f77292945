"""vLLM with and without a cache behind it: the servers, what a client measures, and what work is given to them."""
