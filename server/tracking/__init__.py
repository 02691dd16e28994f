"""Writers for other people's dashboards: each is told the events of a run's journal, and nothing else."""
