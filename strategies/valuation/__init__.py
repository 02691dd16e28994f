"""What sites contribute: coalitions, utilities, Shapley values."""
