"""The file tier: one self-describing chunk a file under a byte quota, with an LMDB manifest beside the files."""
