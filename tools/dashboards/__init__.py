"""Writes the Grafana dashboards of deploy/grafana from code: `make dashboards`."""
