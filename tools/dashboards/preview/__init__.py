"""Draws the answers to the dashboards' queries under a mixed load: `make dashboards-preview`.

__main__  runs the load, asks Prometheus, and writes the pictures
amounts   formats values for people, by Grafana's names of units
drawing   draws a dashboard's answers with matplotlib, in the places of its panels
figures   draws one panel's answers in one pair of axes
reading   reads dashboards as Grafana does
"""
