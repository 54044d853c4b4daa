"""Several devices inside one engine: the group of ranks that compute every step together, and what each one stores."""
