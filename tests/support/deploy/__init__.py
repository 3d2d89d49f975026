"""The objects that we deploy, and questions about them.

compose    the compose files, as they are
envoy      a real Envoy with the configuration that we ship
images     the versions that images are built with
manifests  the objects that `kubectl kustomize` makes of our folders
page       the page docs/kubernetes.md, and the objects that it lists
policies   the connections that NetworkPolicies let through
probes     the services that probes ask about, and the time that a drain takes
rules      the rules of Prometheus
scaling    the metrics that autoscalers watch
schemas    the versions of Kubernetes whose schemas must hold
settings   the class of settings of each service, and values for its secrets
"""
