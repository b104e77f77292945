"""`forebay router`: an OpenAI-compatible proxy that sends requests where their prefix is, or will be soonest.

One process, one event loop. What decides is in `forebay.scheduler`; here are HTTP, health and streams.
"""
