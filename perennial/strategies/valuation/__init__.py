"""The contribution of sites: coalitions, utilities, Shapley values."""
