"""What helps to find out what is wrong with a running store. Secrets stay in it."""
