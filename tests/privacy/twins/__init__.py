"""Twin runs: two copies of a site that differ in one record get the same requests, and are compared."""
