"""The object store tier: chunks in a bucket of any S3-compatible endpoint."""
