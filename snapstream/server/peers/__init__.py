"""What other servers of ours ask this one: to read a prompt and send the row. Nothing here is for clients."""
