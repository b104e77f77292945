"""What a store costs its clients: lookups, stores and loads, alone and in a crowd, beside a peer and the limits."""
