"""The files a person writes, typed: experiment.yaml and site.yaml."""
