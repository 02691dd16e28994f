"""The site's side: the ClientApp, the local learner and its parts, exemplars, policy and durable state."""
