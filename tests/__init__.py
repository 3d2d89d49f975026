"""Tests mirror the packages; `system` starts both services, `support` is what tests are made of."""
