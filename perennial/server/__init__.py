"""The ServerApp: the curriculum of tasks and rounds, checkpoints, evaluation, journal, summary and report."""
