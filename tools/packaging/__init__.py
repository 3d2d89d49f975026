"""Versions, wheels and bills of materials.

audit               queries an advisory service for known vulnerabilities of the versions in
                    constraints.txt
constraints         writes constraints.txt
gpu_versions        `make test-gpu-versions` runs tests/gpu and the GPU run with the versions of the
                    GPU's machine, and with nothing else installed
install             installs this checkout into the environment that runs this module, and shows the
                    progress
prometheus_package  finds Prometheus' programs for tests and previews, and fetches them once
requirements        prints requirements for pip
sbom                writes the software bill of materials of a container image, in CycloneDX
wheel               `make wheel` builds the source distribution, and from it the wheel, in dist/
"""
