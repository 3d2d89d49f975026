"""An S3 server for the demo: moto's, kept in memory, in a process of its own."""
