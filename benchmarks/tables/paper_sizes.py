"""FedDig and TriCon-SF at the sizes of their papers, from the sheets; for a machine with a GPU."""

from benchmarks.paper_sheets import tables_of_sheets

TABLES = tables_of_sheets()
