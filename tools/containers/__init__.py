"""Container images built on this machine, upon bases made of Debian's packages.

    python -m tools.containers

engine: Podman, its packages, and a configuration and storage of its own. bases: what stands in for
published images. images: ours, by the Dockerfile. pip_sources: what pip is configured with here.
"""
