"""Commands about a running server.

generate        generate
pool            embed, classify
life_cycle      pause, resume, sleep, wake
info            info
top             top: reads both services, again and again
top_overview    the figures of top, from two samples
top_view        how top is drawn
bench           bench
bench_adapters  which adapters bench uses
debug           debug
profile         profile
"""
