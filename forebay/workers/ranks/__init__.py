"""Tensor parallel ranks of one worker: processes that share a model, its KV, and every step.

    rank 0   front ends, engine, scheduler, sampling, the connection that looks up     `forebay worker` itself
    rank r   its part of the weights, its heads of the KV pool, its slice of each copy  a child of rank 0

    steps    rank 0 --what to compute--> rank r            a socket pair; msgpack; sent by the engine's thread
    tensors  rank 0 <--sums, logits--> rank r              torch.distributed: gloo on CPUs, NCCL on GPUs
    moves    rank 0 <--what to copy--> rank r              a socket pair; msgpack; used by the transfer thread
    bytes    rank r <--its slices--> the store's pool      each rank has mapped it
    rows     rank r <--one by one--- the store's pool      with hot buffers; the step says where, the rank answers it

Rank 0 decides everything, in plans that name blocks by number; the same number is the same block on every rank. Nothing
is ever unpickled, nobody else can open a socket pair, and tensors stay on loopback.

    network      which interface tensors may use            messages, channel   what is said, and how it is carried
    group        the collectives                            crew                the other ranks, as rank 0 sees them
    leading      rank 0's model: tells the others, computes  follower            the process of another rank
    copying      a rank's slices of a chunk                 pushing, client     rank 0's side of shared writes
                                                            moving              another rank's copies
"""
