"""Secure aggregation: the server learns a sum over sites, and no site's own part of it.

Pure state machines of both sides, without Flower, sockets or files. Bonawitz et al. 2017 (eprint 2017/281).
"""
