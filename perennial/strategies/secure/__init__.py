"""The server's side of secure aggregation: exchanges with the sites, durable progress, opened sums."""
