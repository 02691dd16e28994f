"""What trains and measures a model on one set of samples: at a site or at the server."""
