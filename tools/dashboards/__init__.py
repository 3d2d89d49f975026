"""Writes the Grafana dashboards of deploy/grafana from code: `make dashboards`.

__main__   writes deploy/grafana/dashboards
board      combines panels into a dashboard, and writes it
boards     the dashboards, and their panels by subject
limits     the alerts' thresholds, which panels show
links      links from one dashboard to another, and from a point in a panel to its subject
panels     the kinds of panels in the dashboards
preview    draws the answers to the dashboards' queries
queries    writes PromQL over the metrics of one service, limited by the dashboards' variables
variables  the choices at the top of a dashboard
"""
