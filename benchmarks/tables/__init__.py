"""Tables of benchmarks/table.py; each module has TABLES, by name."""
