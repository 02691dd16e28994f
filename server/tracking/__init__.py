"""Writers for other people's dashboards: each gets the events of a run's journal, and nothing else."""
