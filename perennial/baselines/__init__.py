"""Methods of other people that ours are compared with, written as plug-ins against the same contract."""
