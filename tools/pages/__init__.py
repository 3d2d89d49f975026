"""Generates pages of the documentation from the code.

adapter_docs        writes the tables of docs/adapters.md
api_docs            generates docs/api.md and docs/development/image-protocol.md from the protos and
                    from the code of their calls
api_facts           collects facts for docs/api.md about the calls of both services from the code
bounds_docs         generates the tables of fields and of the catalog's tables in docs/limits.md
bounds_inventory    lists the subjects of rows in docs/limits.md from the code
cli_docs            writes the reference of the `loadout` command into docs/cli.md
configuration_docs  writes docs/configuration.md and examples/settings/*.toml from the settings of
                    both services
docs_site           builds the documentation as a site
metric_docs         generates docs/observability/metrics.md from the services' definitions of their
                    metrics
model_docs          writes docs/models.md from the descriptions in the modules of model families
proto_comments      reads the comments above the declarations of a proto file
sbom_docs           writes docs/sbom, the Python packages of each container image, without a build
sizing_docs         writes the tables of sizes of docs/kubernetes.md, and of sizing.md and ranks.md
                    in docs/operations, computed by the services' own code
"""
