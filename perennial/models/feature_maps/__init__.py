"""Fixed networks, which give a sample the same features at every site and in every task."""
