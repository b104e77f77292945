"""`forebay serve --ray`: the processes of several hosts, placed, started again and scaled by Ray.

Ray starts one actor on each host that is to serve; the actor keeps a `forebay serve` running there (store, workers,
front end), and that is all that goes through Ray. Requests go from the router, which runs where the command does, to
the front ends of the hosts; KV goes between stores. Without Ray the same processes are started by hand
(docs/deploy.md).

    spec       what a host is told, and where it says that it is
    host       the actor's inside: one `forebay serve`, its keys, its restarts. Knows nothing of Ray
    slots      which host serves under which name. Pure
    routing    the router's process, and where it is told that hosts are
    on_ray     the only module that knows Ray
"""
