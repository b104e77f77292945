"""Hot buffers of sparse layers: pages that leave the device, rows that are read in place in the store's pool."""
