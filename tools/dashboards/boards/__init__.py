"""The dashboards, and their panels by subject.

adapters        the dashboard of adapters and caches
adapters_loads  panels of loads, prefetching, and the store's replicas as inference sees them
adapters_tiers  panels of the tiers: hits, evictions, bytes
fleet           the fleet overview
fleet_engine    panels of the engines: queue, steps, pages, states, memory, replicas
fleet_ranks     panels of the processes that compute a model together
places          panels of the resources that tenants share, the same for both services
store           the dashboard of the adapter store
store_images    panels of the store's pulls, images, tiers, catalog and replicas
"""
