"""The chat page: its files, in a browser's own languages, and the routes that serve them."""
