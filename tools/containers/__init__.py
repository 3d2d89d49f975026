"""Builds container images on this machine, on bases made from Debian's packages.

    python -m tools.containers

bases        replacements for published base images
engine       Podman, its packages, and its own configuration and storage
images       our images, built with the Dockerfile
pip_sources  this machine's configuration of pip, for use in a build
"""
