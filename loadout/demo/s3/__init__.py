"""An S3 server for the demo: moto's, in memory, in a process of its own.

__main__  `python -m loadout.demo.s3 READY_FILE`
"""
