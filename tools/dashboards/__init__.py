"""Writes the Grafana dashboards of deploy/grafana from code: `make dashboards`.

__main__        writes deploy/grafana/dashboards
adapters        the dashboard of adapters and caches
adapters_loads  panels of adapters and caches
adapters_tiers  panels of adapters and caches
amounts         formats values for people, by Grafana's names of units
board           combines panels into a dashboard, and writes it
drawing         draws a dashboard's answers with matplotlib, in the places of its panels
figures         draws one panel's answers in one pair of axes
fleet           the fleet overview
fleet_engine    panels of the fleet overview
limits          the alerts' thresholds, which panels show
links           links from one dashboard to another, and from a point in a panel to its subject
panels          the kinds of panels in the dashboards
places          panels of the resources that tenants share, the same for both services
preview         draws the answers to the dashboards' queries under a mixed load
queries         writes PromQL over the metrics of one service, limited by the dashboards' variables
reading         reads dashboards as Grafana does
store           the dashboard of the adapter store
store_images    panels of the adapter store
variables       the choices at the top of a dashboard
"""
