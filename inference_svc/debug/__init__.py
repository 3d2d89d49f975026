"""What helps to find out what is wrong with a running server. Secrets stay in it."""
